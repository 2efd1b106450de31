"""A collective is complete when its links have handed everything on, even those only sent to."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.execute import Execution
from ringcomm.collective.flows import SegmentPool
from ringcomm.ops import Collective
from ringcomm.schedule import tree
from ringcomm.transport.memory import memory_fabrics
from ringcomm.wire.frames import NO_OP, Header

FLOAT64 = np.dtype(np.float64)


class Hoarder:
    """A link that takes everything, but needs to be asked again before it lets go of it."""

    def __init__(self, link, times):
        self.link = link
        self.peer = link.peer
        self.burst_bytes = link.burst_bytes
        self.left = times
        self.send, self.recv = link.send, link.recv

    def settled(self):
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("rank", [0, 1])
def test_the_executor_asks_until_the_link_has_settled(rank):
    fabrics = memory_fabrics(2)
    links = [Hoarder(fabrics[0].link(1), 2), Hoarder(fabrics[1].link(0), 2)]
    for fabric, link in zip(fabrics, links):
        fabric.link = lambda peer, link=link: link
    header = Header(0, 0, Collective.BROADCAST, NO_OP, 12, 0, 8, 0)
    executions = []
    for me in range(2):
        execution = Execution(tree.broadcast(me, 2, 0, 8), fabrics[me], header, FLOAT64, SegmentPool(4096))
        execution.arm(1, np.arange(8.0) * (me == 0))
        executions.append(execution)
    executions[0].advance()  # the root sends everything; rank 1 can receive it from now on
    links[rank].left = 2
    assert [executions[rank].advance() for _ in range(3)] == [False, False, True]
    assert executions[rank].waiting_for() == ([], [])
