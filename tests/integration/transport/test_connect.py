"""The reactor and the dial, with real sockets."""

from __future__ import annotations

import socket
import time

import pytest

from ringcomm.transport import connect
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


def test_alarms_ring_once_and_in_order(reactor):
    fired = []
    for name, delay_s in (("c", 0.03), ("a", 0.0), ("b", 0.01)):
        reactor.after(delay_s, lambda name=name: fired.append(name))
    assert eventually(lambda: reactor.run_once(0.05) or len(fired) == 3)
    reactor.run_once(0.01)
    assert fired == ["a", "b", "c"]


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


def test_a_dial_that_is_given_up_during_the_handshake_is_not_reported(door):
    """As when another endpoint has answered first: the text of a timeout does not count it as turned away."""
    half_open = door.acceptor._half_open
    dial = Dial(door.reactor, door.address, KEY, CLAIM, lambda ended: None, 5.0)
    door.turn_until(lambda: any(item.responder.challenged for item in half_open))
    assert dial.sock is None
    dial.give_up("another endpoint answered first")
    door.turn_until(lambda: not half_open)
    assert door.refused == door.arrived == []


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


class Program:
    """What answers a dial, of its own: it accepts once, and does what the test says."""

    def __init__(self, reactor, **options):
        self.listener, self.ends = listen("127.0.0.1"), []
        self.reactor = reactor
        self.dial = Dial(
            reactor, self.listener.getsockname()[:2], KEY, CLAIM, self.ends.append, 30.0, **options
        )
        self.listener.setblocking(True)
        self.sock, _ = self.listener.accept()
        self.listener.close()
        reactor.run_once(1.0)

    def end(self):
        assert eventually(lambda: self.reactor.run_once(0.01) or bool(self.ends))
        self.sock.close()
        (dial,) = self.ends
        assert dial is self.dial and dial.sock is None
        return dial


def test_a_connection_to_itself_is_refused(reactor, monkeypatch):
    """TCP connects a free port of this machine to itself now and then."""
    monkeypatch.setattr(connect, "_connected_to_itself", lambda sock: True)
    assert Program(reactor).end().reason == "connection refused"
    monkeypatch.undo()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        assert connect._connected_to_itself(sock)
