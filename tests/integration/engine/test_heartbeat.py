"""The heartbeat thread of ranks without an engine: silence, lost links, leaving, late ranks."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from ringcomm.collective.observe import Progress
from ringcomm.engine.observer import Observer
from ringcomm.engine.peer_channels import HeartbeatThread, SilenceLimits
from ringcomm.errors import BrokenInvariantError
from ringcomm.group.failures import Reporter
from ringcomm.transport.tcp import SocketFabric, SocketLink
from tests.support.service import eventually

HOSTS = ["desk", "jetson1"]
LIMIT_S = 30.0
LONG = SilenceLimits(30.0, 0.0, 0.0)
WAITS = Progress(2, 0, "allreduce(shape (8,), float32, op=Sum)", (1,))


class Reports(Reporter):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: list = []

    def note_closed(self, peer: int, why: str) -> None:
        self.closed.append(peer)


class Side:
    """One rank: its link, and its heartbeat thread once :meth:`begin` was called."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.sock = sock
        self.fabric = SocketFabric(rank, {1 - rank: SocketLink(1 - rank, sock)})
        self.reporter = Reports()
        self.failure = None
        self.failed = threading.Event()
        self.on_failure = lambda: None

    def begin(
        self,
        limits: SilenceLimits,
        progress: Progress = Progress(),  # noqa: B008
        elsewhere: str = "",
    ) -> HeartbeatThread:
        self.heartbeat = HeartbeatThread(
            self.fabric, HOSTS, limits, self.reporter, lambda: progress, self._fail, "process group 7",
            lambda: elsewhere,
        )  # fmt: skip
        return self.heartbeat

    def _fail(self, error) -> None:
        self.failure = error
        self.on_failure()
        self.failed.set()

    def end(self) -> None:
        if hasattr(self, "heartbeat"):
            self.heartbeat.stop()
        self.fabric.close()


@pytest.fixture
def sides(no_leaks):
    made = [Side(rank, sock) for rank, sock in enumerate(socket.socketpair())]
    yield made
    for side in made:
        side.end()


def test_a_rank_that_hangs_up_without_a_word_is_reported(sides):
    sides[0].begin(LONG)
    sides[1].fabric.close()
    assert eventually(lambda: sides[0].reporter.closed == [1])


def test_a_late_rank_is_named_with_its_stack(sides, caplog):
    with caplog.at_level(logging.WARNING, "ringcomm.engine"):
        sides[1].begin(SilenceLimits(30.0, 0.2, 0.0))
        sides[0].begin(SilenceLimits(30.0, 0.2, 0.0), WAITS)
        assert eventually(lambda: "for which others wait, is here" in caplog.text)
    first = next(record.getMessage() for record in caplog.records)
    assert first.startswith(f"Process group 7: {WAITS.doing}, call number 1, has waited")
    assert "on rank 0 (desk) for rank 1 (jetson1)" in first
    assert "Rank 1 (jetson1), for which others wait, is here" in caplog.text
    assert "test_a_late_rank_is_named" in caplog.text  # its main thread is this one


def test_a_bug_in_it_ends_the_group(sides, caplog):
    """Otherwise nothing would ever be found out again."""

    class Broken(Reports):
        def check(self) -> None:
            raise ZeroDivisionError("a bug")

    sides[0].reporter = Broken()
    sides[0].begin(LONG)
    assert sides[0].failed.wait(10)
    assert isinstance(sides[0].failure, BrokenInvariantError)
    assert str(sides[0].failure) == "watch over process group 7: ZeroDivisionError: a bug"
    assert "the watch over process group 7 failed on rank 0" in caplog.text
    sides[0].heartbeat.settle(LIMIT_S)  # there is nothing to wait for


def test_what_observers_see_is_brought_to_rank_0(sides):
    taken, came = [], threading.Event()

    def sink(rank: int, events: list) -> None:
        taken.append((rank, [event[0] for event in events]))
        came.set()

    for side in sides:
        side.begin(LONG)
    observers = [Observer(), Observer()]
    for side, observer in zip(sides, observers):
        side.heartbeat.observe(observer, sink if side is sides[0] else None)
        assert side.heartbeat.observer is observer
    observers[1].call_made("send")
    for side in sides[::-1]:
        side.heartbeat.observe(None)
        assert side.heartbeat.observer is None
    assert came.wait(10)
    assert taken == [(1, ["send"])]
    sides[1].heartbeat.settle(LIMIT_S)
    assert not sides[1].heartbeat._outbox
    sides[1].heartbeat.stop()
    sides[0].heartbeat.settle(LIMIT_S)  # until all others have left
    assert sides[0].heartbeat._peers.settled(())
