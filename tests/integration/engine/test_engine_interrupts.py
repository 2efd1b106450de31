"""What interrupts an engine, or fails in it: the job ends, and the errors name the rank."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from ringcomm.errors import (
    BrokenInvariantError,
    Misuse,
    PeerLostError,
    RingcommError,
)
from ringcomm.ops import Sum
from ringcomm.testing.cluster import RankFailed, run_ranks
from tests.integration.engine.engines import LIMIT_S, PLAIN
from tests.support.service import eventually


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
