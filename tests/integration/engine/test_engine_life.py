"""What an engine does besides its operations: observers, pauses, interrupts, and its end."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from ringcomm.clock import Polling
from ringcomm.engine import thread as thread_module
from ringcomm.engine.observer import Observer
from ringcomm.engine.thread import EngineThread
from ringcomm.errors import (
    Misuse,
    NotInitializedError,
    PeerLostError,
)
from ringcomm.ops import Average, Sum
from ringcomm.testing.cluster import run_ranks
from tests.integration.engine.engines import LIMIT_S, PLAIN, reduced
from tests.support.service import eventually


def test_join_while_a_join_is_going_on():
    def work(context):
        if context.rank == 0:
            first = context.engine.join()
            with pytest.raises(Misuse, match="an earlier join"):
                context.engine.join()
            context.barrier()
        else:
            context.barrier()
            first = context.engine.join()
        return first.wait(LIMIT_S)

    assert run_ranks(2, work, settings=PLAIN) == [1, 1]


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


def test_numbers_about_what_it_has_done():
    def work(context):
        context.engine.allreduce([np.ones(100_000, np.float32)], Sum, "x", urgent=True).wait(LIMIT_S)
        context.engine.allreduce([np.ones(2)], Average).wait(LIMIT_S)
        return context.engine.buckets.reduced_bytes

    assert run_ranks(2, work, settings=PLAIN) == [400_016] * 2


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


def test_in_a_fork_it_does_nothing():
    """What a fork would do is tried here, with the number of another process; test_fork.py has real ones."""

    def work(context):
        thread, own = context.engine._thread, context.engine._thread._pid
        handle = context.engine.allreduce([np.ones(3)], Sum, "x")
        thread._pid = -1
        for call in (handle.wait, lambda: context.engine.barrier("y"), context.engine.join):
            with pytest.raises(Misuse, match=f"a fork of rank {context.rank}"):
                call()
        thread.stop()  # of its parent
        thread._pid = own
        handle.wait(LIMIT_S)
        return reduced(context, "z")

    assert run_ranks(2, work, settings=PLAIN) == [[3.0] * 3] * 2


def test_how_far_an_operation_is_that_another_rank_keeps_waiting():
    seen = threading.Event()

    class Slow(Observer):
        def activity(self, bucket, name):
            assert seen.wait(LIMIT_S)

    def work(context):
        engine = context.engine
        if context.rank == 1:
            engine.observe(Slow())
        context.barrier()
        handle = engine.allreduce([np.ones(1 << 20, np.float32)], Sum, "x")  # more than a pipe holds

        def moved():
            row = engine.history.rows()[-1]
            return row["state"] == "running" and row["moved"] > 0

        if context.rank == 0:
            assert eventually(moved)
            seen.set()
        handle.wait(LIMIT_S)
        assert engine.buckets.moved_bytes(0) == 0  # it runs no more
        return engine.history.rows()[-1]["state"]

    assert run_ranks(2, work, settings=PLAIN) == ["done", "done"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_pause_is_recorded_as_long_as_it_lasts(size):
    def work(context):
        history = context.engine.history
        with context.engine.pause("saving checkpoint"):
            inside = None if history is None else history.paused
        return inside, "" if history is None else history.paused

    recorded = run_ranks(size, work, settings=PLAIN)
    assert recorded == [(None, "") if size == 1 else ("saving checkpoint", "")] * size


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


def test_a_process_set_that_is_none_is_not_removed():
    def work(context):
        engine = context.engine
        number = engine.add_process_set([2, 1])
        removed = [engine.remove_process_set(item) for item in (0, 7, number, number)]
        return number, removed

    assert run_ranks(3, work, settings=PLAIN) == [(1, [False, False, True, False])] * 3


class TestEnd:
    def test_what_is_said_last_is_waited_for(self):
        def work(context):
            context.engine.barrier("all are here").wait(LIMIT_S)
            if context.rank == 0:
                context.engine.settle(LIMIT_S)  # until all others have left
                return context.engine._thread._state.peers.settled(())
            context.engine.settle(LIMIT_S)
            return context.engine._thread._state.peers.settled(())

        assert run_ranks(2, work, settings=PLAIN) == [True, True]
        assert run_ranks(1, lambda context: context.engine.settle(LIMIT_S), settings=PLAIN) == [None]

    def test_its_own_thread_may_end_it(self):
        """As a callback of an operation may, which runs there."""

        def work(context):
            ended = threading.Event()
            thread: EngineThread = context.engine._thread
            context.engine.barrier("all are here").wait(LIMIT_S)

            def end(_):
                assert threading.current_thread() is thread._thread
                context.engine.stop()
                ended.set()

            with thread._turn:  # so that it is not done before the callback is known
                handle = context.engine.allreduce([np.ones(3)], Sum, "x")
                handle.when_done(end)
            assert ended.wait(LIMIT_S)
            with pytest.raises(NotInitializedError, match="shut down"):
                context.engine.barrier("again")
            return True

        assert run_ranks(2, work, settings=PLAIN) == [True, True]


def test_a_caller_that_waits_does_the_work_and_the_engines_thread_what_is_not_waited_for():
    def work(context):
        thread, seen = context.engine._thread, set()
        state, cycle = thread._state, thread._state.cycle

        def watched():
            seen.add(threading.current_thread())
            return cycle()

        state.cycle = watched
        for _ in range(100):
            context.engine.allreduce([np.ones(3)], Sum, "x").wait()
            if threading.current_thread() in seen:
                break  # on a busy machine the engine's thread may come first
        context.barrier()
        seen.clear()
        handle = context.engine.allreduce([np.ones(3)], Sum, "not waited for")
        assert handle.block(LIMIT_S)
        return threading.current_thread() not in seen and thread._thread in seen

    assert run_ranks(2, work, settings=PLAIN) == [True, True]


def test_a_process_set_goes_on_without_ranks_that_are_not_in_it():
    def work(context):
        engine = context.engine
        number = engine.add_process_set([0, 2])
        if context.rank == 1:
            return None  # it leaves the job
        gone = engine._thread._state.peers.messages.gone
        assert eventually(lambda: 1 in gone)
        sums = [reduced(context, name, process_set=number)[0] for name in ("a", "a", "b")]
        with pytest.raises(PeerLostError) as caught:
            reduced(context, "of all ranks")
        assert caught.value.rank == 1
        return sums

    assert run_ranks(3, work, "tcp", PLAIN) == [[4.0] * 3, None, [4.0] * 3]
