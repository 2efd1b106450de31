"""What an engine does besides its operations: observers, pauses, interrupts, and its end."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from ringcomm.clock import Polling
from ringcomm.engine import thread as thread_module
from ringcomm.engine.observer import Observer
from ringcomm.errors import (
    PeerLostError,
)
from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks
from tests.integration.engine.engines import PLAIN, reduced


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
