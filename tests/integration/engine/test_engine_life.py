"""What an engine does besides its operations: observers, pauses, interrupts, its end, and no leaks."""

from __future__ import annotations

import ctypes
import gc
import threading
from dataclasses import replace

import numpy as np
import psutil
import pytest

from ringcomm.clock import Polling
from ringcomm.engine import thread as thread_module
from ringcomm.engine.observer import Observer
from ringcomm.errors import BrokenInvariantError, Misuse, PeerLostError, RingcommError
from ringcomm.ops import Max, Sum
from ringcomm.testing.cluster import RankFailed, run_ranks
from tests.integration.engine.engines import LIMIT_S, PLAIN, reduced
from tests.support.service import eventually


@pytest.mark.parametrize("size", [1, 2])
def test_an_observer_sees_operations_until_there_is_none(size):
    def work(context):
        events = []

        def sink(rank, found):
            events.extend(tuple(event[:3]) for event in found)

        engine, observer = context.engine, Observer()
        assert engine.observer is None
        engine.observe(observer, sink if context.rank == 0 else None)
        assert engine.observer is observer
        context.barrier()
        reduced(context, "seen")
        context.barrier()
        engine.observe(None)
        assert engine.observer is None
        context.barrier()  # otherwise rank 0 may still observe what another rank announces
        reduced(context, "unseen")
        context.barrier()
        return events

    events, *others = run_ranks(size, work, settings=PLAIN)
    assert others == [[]] * (size - 1)
    assert events.count(("allreduce.seen", "B", "ALLREDUCE")) == size
    assert events.count(("allreduce.seen", "B", "RINGCOMM_ALLREDUCE")) == size
    assert not any("unseen" in label for label, *_ in events)


def test_a_caller_that_waits_polls_before_it_sleeps(monkeypatch):
    """A wake-up would cost more than a short operation."""
    polled = threading.Event()
    monkeypatch.setattr(thread_module, "POLLING", Polling(give_way=polled.set))

    def work(context):
        for _ in range(10_000):  # the first may be done before it is waited for
            seen = np.array([float(polled.is_set())])
            context.engine.allreduce([seen], Sum, "x").wait()
            if seen[0]:
                return True
        return False

    assert run_ranks(2, work, settings=replace(PLAIN, spin_us=30e6)) == [True, True]


@pytest.mark.parametrize("fails", [True, False], ids=["the block fails", "the block succeeds"])
def test_a_pause_during_which_the_job_fails(fails):
    """Its end does not hide why the block has failed; otherwise the program learns of the loss there."""
    lost, problem = PeerLostError("rank 7 was lost", rank=7), OSError("no space left on device")

    def work(context):
        expected = OSError if fails else PeerLostError
        with pytest.raises(expected) as caught, context.engine.pause("saving checkpoint"):
            context.engine._thread._state.broken = lost
            if fails:
                raise problem
        assert caught.value is problem if fails else str(caught.value) == str(lost)
        return context.engine.history.paused

    assert run_ranks(2, work, settings=PLAIN) == ["", ""]


def lost_by_rank_0(work):
    """Rank 1 works, and ends regularly; rank 0 waits, and has lost it: the error of rank 0."""

    def each(context):
        context.engine.barrier("all are here").wait(LIMIT_S)
        return work(context) if context.rank else context.engine.barrier("never").wait(LIMIT_S)

    with pytest.raises(RankFailed) as caught:
        run_ranks(2, each, "tcp", PLAIN)
    error, nothing = caught.value.errors
    assert nothing is None and isinstance(error, PeerLostError) and error.rank == 1
    return error


class TestInterrupts:
    def test_a_wait_that_is_interrupted_ends_the_job_and_names_the_rank(self):
        """An exception from outside, as Ctrl-C is one in the main thread."""

        def work(context):
            ident = threading.get_ident()
            handle = context.engine.allreduce([np.ones(3)], Sum, "x")
            errors = []

            def other():
                with pytest.raises(RingcommError) as caught:
                    handle.wait()
                errors.append(caught.value)

            thread = threading.Thread(target=other)
            thread.start()
            state = context.engine._thread._state

            def interrupt():
                if eventually(lambda: len(state.waiters.waits) == 2):
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Stop))

            threading.Thread(target=interrupt).start()
            with pytest.raises(Stop):
                handle.wait()
            thread.join(LIMIT_S)
            assert "was interrupted (Stop) in allreduce(shape (3,), float64, op=Sum) 'x'" in str(errors[0])
            with pytest.raises(RingcommError):
                context.engine.barrier("again")
            return "interrupted"

        class Stop(BaseException):
            pass

        assert "interrupted (Stop)" in str(lost_by_rank_0(work))

    def test_between_the_parts_of_a_call(self):
        """No other rank could find out that the rest does not come."""

        def work(context):
            with pytest.raises(KeyError), context.engine.in_parts():
                raise KeyError("learning_rate")
            assert eventually(lambda: context.engine._thread._state.broken is not None)
            return True

        assert "KeyError: 'learning_rate'" in str(lost_by_rank_0(work))


def test_a_bug_in_the_engine_fails_what_is_on_its_way_and_the_job(caplog):
    def work(context):
        handle = context.engine.allreduce([np.ones(3)], Sum, "x")
        assert context.engine._thread._guarded(lambda: 1 // 0) is False
        with pytest.raises(BrokenInvariantError, match="engine of rank 1 failed: ZeroDivisionError"):
            handle.wait(LIMIT_S)
        with pytest.raises(Misuse, match="has failed before.*ZeroDivisionError"):
            context.engine.barrier("again")
        return True

    lost_by_rank_0(work)
    assert "the engine of rank 1 failed" in caplog.text


def opened():
    process = psutil.Process()
    return process.num_fds(), threading.active_count()


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_hundred_thousand_small_operations_leak_nothing():
    steady = {}

    def work(context):
        array = np.ones(2)
        for n in range(50_000):
            context.engine.allreduce([array], Max, "same" if n % 2 else "").wait(2 * LIMIT_S)
            if n == 5_000 and context.rank == 0:
                gc.collect()
                steady["before"] = (psutil.Process().memory_info().rss, *opened())
        if context.rank == 0:
            gc.collect()
            steady["after"] = (psutil.Process().memory_info().rss, *opened())
        context.barrier()

    run_ranks(2, work, "memory", timeout_s=280.0)
    before, after = steady["before"], steady["after"]
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 3_000_000
