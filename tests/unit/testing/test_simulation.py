"""The simulation itself: it finds schedules that wait for ever, and faults do what they say."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.schedule.steps import Recv, Send
from ringcomm.testing.faulty import Cut, Faults, FaultyFabric, Turns
from ringcomm.transport.base import LinkClosed
from ringcomm.transport.memory import memory_fabrics
from tests.support.simulation import Hang, simulate

SOUND = {"would_block": 0.0, "short": 0.0}


def faulty(**faults):
    """Rank 0 over faulty links, and rank 1 over sound ones, with the clock of the faults."""
    one, other = memory_fabrics(2)
    turns = Turns()
    return FaultyFabric(one, Faults(**{**SOUND, **faults}), turns), other, turns


class TestHangs:
    @pytest.mark.parametrize("count", [4, 400])
    def test_ranks_that_wait_for_each_other(self, count):
        """Each waits for what the other sends only afterwards; short messages and long ones."""
        schedules = [[Recv((1 - rank,), 0, count), Send(1 - rank, 0, count)] for rank in range(2)]
        with pytest.raises(Hang, match=r"seed 3: ranks \[0, 1\] wait for ever\. rank 0 moved .*reads from"):
            simulate(schedules, [np.zeros(count) for _ in range(2)], seed=3)

    def test_a_cable_that_is_pulled(self):
        schedules = [[Send(1, 0, 400)], [Recv((0,), 0, 400)]]
        faults = Faults(**SOUND, cuts=(Cut(0, 1, True, 100, silent=True),))
        errors = simulate(schedules, [np.zeros(400) for _ in range(2)], seed=0, faults=faults)
        assert errors[0] is None  # it has sent everything, as far as it can see
        assert isinstance(errors[1], LinkClosed)


class TestFaults:
    def test_a_link_that_breaks_after_so_many_bytes(self):
        fabric, other, _ = faulty(cuts=(Cut(0, 1, True, 3),))
        link = fabric.link(1)
        assert link.carrier == other.link(0).carrier
        assert link.send([memoryview(b"ab"), memoryview(b"cd")]) == 3
        for move in (link.send, link.recv):
            with pytest.raises(LinkClosed, match="cut by the test"):
                move([memoryview(bytearray(1))])
        assert link.readable() and link.writable()
        into = bytearray(4)
        assert other.link(0).recv([memoryview(into)]) == 3 and into == b"abc\0"
        with pytest.raises(LinkClosed):
            other.link(0).recv([memoryview(into)])
