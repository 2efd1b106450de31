"""A group of ranks: what it is made of, and the order in which it ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringcomm.config import Settings
from ringcomm.engine.observer import OwnTrace
from ringcomm.errors import (
    Misuse,
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
)
from ringcomm.group.failures import GroupWatch, Reporter
from ringcomm.group.group import Group, Peer
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
    return SimpleNamespace(control=control, generation=4, relayed=frozenset())


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

# ---- what a group's watch reports, in the whole job's numbers of ranks ---------------------------


class Connection(Reporter):
    """Reports as the connection to a rendezvous does: rank 0 of the group is this one."""

    def __init__(self):
        self.closed, self.warned = [], []

    def fileno(self):
        return 7

    def await_abort(self, limit_s):
        return self.abort_error

    def note_closed(self, peer, why):
        self.closed.append((peer, why))

    def warn(self, topic, text):
        self.warned.append((topic, text))

    def note_interrupted(self, doing, why):
        self._interruption = self._interruption or PeerLostError(f"{doing}: {why}", rank=0, host="desk")
        return self._interruption


@pytest.fixture
def control():
    return Connection()


@pytest.fixture
def watch(control):
    """Of a group whose rank 0 is rank 1 of the job, and whose rank 1 is rank 2."""
    return GroupWatch(control, (1, 2))


def failure_of(act):
    with pytest.raises(Exception) as caught:  # noqa: B017 - the caller looks at it
        act()
    return caught.value


def test_the_root_cause_names_a_rank_of_the_job(watch, control):
    control.abort_error = PeerLostError("rank 1 (jetson, rank 2 of all) was lost", rank=1, host="jetson")
    for _ in range(3):
        error = failure_of(watch.check)
        assert (type(error), error.rank, error.host) == (PeerLostError, 2, "jetson")
        assert (watch.abort_error.rank, watch.failure.rank) == (2, 2)
    assert control.abort_error.rank == 1


def test_a_lost_peer_is_one_of_the_job(watch, control):
    error = watch.report_lost(1, "allreduce", "not a byte for 3 s", "stalled")
    assert isinstance(error, PeerStalledError) and error.rank == 2 and watch.failure.rank == 2
    assert "allreduce: not a byte for 3 s" in str(error)
    assert control.abort_error.rank == 1
    watch.report_lost(0, "barrier", "it closed the connection")
    assert watch.failure.rank == 2, "the first failure counts"


def test_after_an_abort_nothing_else_is_the_root_cause(watch, control):
    error = NotInitializedError("it called abort()")
    watch.abort(error)
    assert watch.report_lost(1, "allreduce", "it closed the connection") is error
    assert watch.root_cause(PeerLostError("lost", rank=2)) is error
    assert failure_of(watch.check) is error
    assert control.abort_error is None


class TestTheGroupOfAllRanks:
    """Rank 2 has left the group of ranks 1 and 2, since it lost rank 3 of another group."""

    def left(self, control):
        control.abort_error = PeerLostError("rank 1 (rank 2 of all) has finished", rank=1)

    def watched(self, control, error):
        of_all = Connection()
        of_all.abort_error = error
        return GroupWatch(control, (1, 2), GroupWatch(of_all, (0, 1, 2, 3)))

    def test_it_has_the_root_cause(self, control):
        watch = self.watched(control, PeerStalledError("rank 3 (jetson) is silent.", rank=3, host="jetson"))
        self.left(control)
        error = failure_of(watch.check)
        assert (type(error), error.rank, error.host) == (PeerStalledError, 3, "jetson")
        assert str(failure_of(watch.check)) == str(error) and watch.abort_error.rank == 3
        text = "rank 3 (jetson) is silent. After that, in another group: rank 1 (rank 2 of all) has finished"
        assert str(error) == text and str(watch.failure) == text

    @pytest.mark.parametrize(
        "error", [None, PeerLostError("rank 2 was lost", rank=2), PeerLostError("no name"), Misuse("no room")]
    )
    def test_it_has_no_earlier_one(self, control, error):
        watch = self.watched(control, error)
        self.left(control)
        assert (failure_of(watch.check).rank, watch.failure.rank) == (2, 2)
