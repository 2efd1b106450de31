"""The reactor and the dial, with real sockets."""

from __future__ import annotations

import os
import socket
import time

import pytest

from ringcomm.transport.connect import ASK_AGAIN_S, Dial, listen
from ringcomm.transport.reactor import READ, Reactor
from ringcomm.wire.auth import job_digest
from tests.contract.service import CLAIM, KEY, Door, eventually


@pytest.fixture
def reactor(no_leaks):
    reactor = Reactor()
    yield reactor
    reactor.close()


@pytest.fixture
def door(reactor):
    """A listener with an acceptor behind it."""
    door = Door(reactor)
    yield door
    door.close()


def test_a_callback_may_close_a_socket_that_is_ready_too(reactor):
    """Two sockets are ready in the same turn; whichever is served first closes both."""
    pairs = [socket.socketpair() for _ in range(2)]
    served = []

    def close_both():
        served.append(1)
        for mine, _ in pairs:
            reactor.forget(mine)
            mine.close()

    for mine, theirs in pairs:
        theirs.send(b"!")
        reactor.watch(mine, READ, close_both)
    reactor.run_once(1.0)
    assert served == [1]
    for _, theirs in pairs:
        theirs.close()


def test_waits_may_be_endless(reactor):
    moments = []
    reactor.after(0.01, lambda: moments.append(1))
    reactor.run_once(float("inf"))
    mine, theirs = socket.socketpair()
    theirs.send(b"!")
    reactor.watch(mine, READ, lambda: moments.append(2))
    for timeout_s in (float("inf"), 1e12):
        reactor.run_once(timeout_s)
    assert moments == [1, 2, 2]
    theirs.close()


def test_alarms_ring_once_and_in_order(reactor):
    fired = []
    for name, delay_s in (("c", 0.03), ("a", 0.0), ("b", 0.01)):
        reactor.after(delay_s, lambda name=name: fired.append(name))
    assert eventually(lambda: reactor.run_once(0.05) or len(fired) == 3)
    reactor.run_once(0.01)
    assert fired == ["a", "b", "c"]


def test_closing_closes_what_is_still_watched():
    reactor = Reactor()
    mine, theirs = socket.socketpair()
    kept, other = socket.socketpair()
    reactor.watch(mine, READ, lambda: None)
    reactor.watch(kept, READ, lambda: None)
    reactor.forget(kept)
    reactor.forget(kept)
    reactor.close()
    assert mine.fileno() == -1
    assert kept.fileno() >= 0
    for sock in (theirs, kept, other):
        sock.close()


def test_dial_and_accept(door):
    ends = []
    Dial(door.reactor, door.address, KEY, CLAIM, ends.append, 5.0)
    door.turn_until(lambda: ends and door.arrived)
    sock, claim = door.arrived[0]
    assert claim == CLAIM
    assert ends[0].reason == ""
    sock.send(b"hello")
    assert eventually(lambda: _peek(ends[0].sock) == b"hello")
    ends[0].sock.close()


def _peek(sock):
    try:
        return sock.recv(10)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize(
    "change, reason, by_key",
    [
        ({"key": b"x" * 32}, "does not hold this job's key", True),
        ({"claim": CLAIM._replace(job=job_digest("other"))}, "belongs to another job", True),
    ],
)
def test_dial_that_is_not_accepted(door, change, reason, by_key):
    ends = []
    values = {"key": KEY, "claim": CLAIM, **change}
    Dial(door.reactor, door.address, values["key"], values["claim"], ends.append, 5.0)
    door.turn_until(lambda: ends and door.refused)
    assert (ends[0].sock, ends[0].refused_by_key) == (None, by_key)
    assert reason in ends[0].reason
    assert door.arrived == []


def test_dial_to_a_closed_port(reactor):
    listener = listen("127.0.0.1")
    address = listener.getsockname()[:2]
    listener.close()
    ends = []
    Dial(reactor, address, KEY, CLAIM, ends.append, 5.0)
    assert eventually(lambda: reactor.run_once(0.01) or bool(ends))
    assert "refused" in ends[0].reason


def test_dial_to_an_address_that_cannot_be_reached_at_all(reactor):
    ends = []
    Dial(reactor, ("255.255.255.255", 1), KEY, CLAIM, ends.append, 5.0)
    assert ends == [], "it ends in the loop, not while it is being made"
    assert eventually(lambda: reactor.run_once(0.01) or bool(ends))
    assert ends[0].reason and ends[0].sock is None


def test_a_dial_to_a_silent_peer_gives_up_in_time(reactor):
    silent = listen("127.0.0.1")
    ends = []
    Dial(reactor, silent.getsockname()[:2], KEY, CLAIM, ends.append, 0.05)
    assert eventually(lambda: reactor.run_once(0.05) or bool(ends))
    assert ends[0].reason == "no answer within 0.05 s"
    silent.close()


def test_a_peer_that_waits_in_vain_asks_again(reactor):
    """The acceptor takes no connection, and later it does."""
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))
    closed.listen(0)
    closed.setblocking(False)
    with closed, socket.create_connection(closed.getsockname()):
        ends = []
        Dial(reactor, closed.getsockname(), KEY, CLAIM, ends.append, 30.0)
        until_s = time.monotonic() + 5 * ASK_AGAIN_S
        while time.monotonic() < until_s:
            reactor.run_once(0.05)
        assert ends == []
        acceptor = Door(reactor, closed)
        acceptor.turn_until(lambda: ends and acceptor.arrived)
        assert ends[0].sock is not None
        ends[0].sock.close()
        acceptor.close()


@pytest.mark.parametrize("turns", [1, 2])
def test_a_peer_at_a_crowded_unix_socket_asks_again(reactor, turns):
    """The system reports at once that too many wait, but not when there is room."""
    address = f"@ringcomm-test-{os.getpid()}"
    closed = listen(address)
    closed.listen(0)
    with closed, socket.socket(socket.AF_UNIX) as other:
        other.connect(closed.getsockname())
        ends = []
        Dial(reactor, (address, 0), KEY, CLAIM, ends.append, 30.0)
        until_s = time.monotonic() + turns * ASK_AGAIN_S
        while time.monotonic() < until_s:
            reactor.run_once(0.05)
        assert ends == []
        acceptor = Door(reactor, closed)
        acceptor.turn_until(lambda: ends and acceptor.arrived)
        ends[0].sock.close()
        acceptor.close()
