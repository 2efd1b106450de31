"""A group of ranks: what it is made of, and the order in which it ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringcomm.config import Settings
from ringcomm.engine.observer import OwnTrace
from ringcomm.errors import NotInitializedError
from ringcomm.group.failures import Reporter
from ringcomm.group.group import Group
from ringcomm.group.view import Peer
from ringcomm.transport.base import Stopped
from ringcomm.transport.memory import memory_channels


class Control(Reporter):
    """A connection to a rendezvous; ``said`` has what it has sent."""

    def __init__(self):
        self.said = []

    def leave(self, reason, ok):
        self.said.append((reason, ok))


@pytest.fixture
def make():
    """Makes rank 1 of a group of three on two hosts."""
    groups = []

    def group(**changes):
        peers = [Peer(rank, f"host{host}", host, local, 1) for rank, host, local in
                 ((0, 0, 0), (1, 1, 0), (2, 1, 1))]  # fmt: skip
        made = Group(memory_channels(3)[1], peers, Settings(), **changes)
        groups.append(made)
        return made

    yield group
    for made in groups:
        made.channels.close()


def joined(control):
    return SimpleNamespace(control=control, generation=4)


@pytest.mark.parametrize(
    "ok, aborted, failed", [(True, False, False), (False, False, True), (True, True, True)]
)
def test_the_order_in_which_it_leaves(make, ok, aborted, failed):
    control, order = Control(), []
    group = make(joined=joined(control), members=[3, 5, 7])
    group.record(OwnTrace(), "group x")
    assert group.flight.facts == (5, 3, "host1", 4, [3, 5, 7], "group x")
    group.flight.close = lambda *facts: order.append(facts)
    group.recording.finish = lambda: order.append("timeline")
    group._detector.stop = lambda: order.append("detector")
    if aborted:
        control.report_lost(2, "", "its cable is out")
    group.leave("bye", ok)
    assert order == [("bye", ok, None), *(["timeline"] if ok else []), "detector"]
    assert control.said == [("bye", ok)] and group.failed is failed
    with pytest.raises(Stopped):
        group.channels.direct.watch.check()
    with pytest.raises(NotInitializedError, match="left the job"):
        group.runner.barrier()
    group.close()
