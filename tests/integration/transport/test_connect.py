"""The reactor and the dial, with real sockets."""

from __future__ import annotations

import socket
import time

import pytest

from ringcomm.transport.connect import ASK_AGAIN_S, IDLE_S, Dial, listen
from ringcomm.transport.reactor import READ
from ringcomm.wire.auth import job_digest
from tests.support.service import CLAIM, KEY, Door, eventually


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


def test_dial_and_accept(door):
    ends = []
    Dial(door.reactor, door.address, KEY, CLAIM, ends.append, 5.0)
    door.turn_until(lambda: ends and door.arrived)
    sock, claim = door.arrived[0]
    assert claim == CLAIM
    assert ends[0].reason == ""
    if hasattr(socket, "TCP_KEEPIDLE"):  # routers forget a connection that is idle
        idle_s = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) for end in (sock, ends[0].sock)]
        assert idle_s == [IDLE_S] * 2 and sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
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
    assert reason in door.refused[0], "both ends report why"
    assert door.arrived == []


def test_a_dial_to_a_silent_peer_gives_up_in_time(reactor):
    silent = listen("127.0.0.1")
    ends = []
    Dial(reactor, silent.getsockname()[:2], KEY, CLAIM, ends.append, 0.05)
    assert eventually(lambda: reactor.run_once(0.05) or bool(ends))
    assert ends[0].reason == "no answer within 0.05 s" and ends[0].no_answer and ends[0].too_slow
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
