"""Connections with real sockets: which peers are accepted, what that may cost; the reactor and the dial."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import socket
import struct
import time
from contextlib import ExitStack

import pytest

from ringcomm.errors import AuthenticationError
from ringcomm.storage.keys import make_certificate
from ringcomm.transport import connect
from ringcomm.transport.connect import ASK_AGAIN_S, IDLE_S, MAX_HALF_OPEN, Dial, listen
from ringcomm.transport.reactor import READ, SecureSocket, encryption_of
from ringcomm.wire.auth import Admission, Initiator, job_digest, place_of, plain_answer
from tests.support.garbage import HELLO
from tests.support.service import CLAIM, KEY, Door, eventually

LONG_S = 600.0


@pytest.fixture(params=["plain", "encrypted"])
def street(request, reactor, monkeypatch):
    """With 20 places, which failed connections keep until the test gives them back."""
    monkeypatch.setattr(connect, "MAX_HALF_OPEN", 20)
    with ExitStack() as stack:
        yield Street(reactor, stack, LONG_S, encrypt=request.param == "encrypted")


def test_ranks_that_come_together_wait_for_nothing(street):
    """More than there are places."""
    for _ in range(50):
        street.rank()
    street.door.turn_until(lambda: len(street.ends) == len(street.door.arrived) == 50)
    assert set(street.ends) == {""}
    assert street.door.acceptor._failed == 0
    assert street.door.refused == []


def test_no_connection_is_accepted_while_failed_ones_keep_all_places(street):
    for _ in range(45):
        street.peer(b"GET / HTTP/1.1\r\n\r\n")
    street.door.turn_until(lambda: len(street.door.refused) >= 20)
    street.door.turn_for(0.2)
    assert len(street.door.refused) == 20
    street.rank()
    street.door.turn_for(0.3)
    assert street.door.arrived == [] and street.ends == []
    # The peer with the key comes after those that have waited before it.
    street.time_passes()
    street.door.turn_until(lambda: len(street.door.refused) >= 40)
    street.time_passes()
    street.door.turn_until(lambda: street.door.arrived and street.ends == [""])
    assert len(street.door.refused) == 45 and street.door.acceptor.kept_waiting


def test_a_place_comes_back_with_time(reactor):
    with ExitStack() as stack:
        street = Street(reactor, stack, 0.01)
        for _ in range(3 * MAX_HALF_OPEN):
            street.peer(b"GET / HTTP/1.1\r\n\r\n")
        street.door.turn_until(lambda: len(street.door.refused) == 3 * MAX_HALF_OPEN)


def test_tls_is_not_answered_without_the_jobs_key(reactor):
    """A hello costs no more than any other bytes, and its sender receives nothing."""
    with ExitStack() as stack:
        street = Street(reactor, stack, LONG_S, encrypt=True)
        copied = Admission.of(KEY)
        street.peer(copied + HELLO).shutdown(socket.SHUT_WR)
        street.door.turn_until(lambda: street.door.acceptor._failed == 1)
        others = [b"", Admission.of(b"x" * 32), spoiled(Admission.of(KEY)), copied]
        peers = [street.peer(other + HELLO) for other in others]
        street.door.turn_until(lambda: len(street.door.refused) == len(others))
        for peer, other in zip(peers, others):
            answer = received(peer)
            if other in (b"", copied):
                assert answer == b""
            else:
                assert isinstance(plain_answer(answer), AuthenticationError)


def spoiled(data):
    """The same with the last bit flipped."""
    return data[:-1] + bytes([data[-1] ^ 1])


def received(sock):
    """All that the other end has sent before it closed the connection."""
    sock.setblocking(True)
    try:
        return sock.recv(1000)
    except ConnectionResetError:
        return b""


def test_a_rank_gets_in_once_silent_connections_have_expired(reactor, monkeypatch):
    monkeypatch.setattr(connect, "HANDSHAKE_S", 0.2)
    with ExitStack() as stack:
        street = Street(reactor, stack)
        for _ in range(2 * MAX_HALF_OPEN):
            street.peer()
        street.rank()
        street.door.turn_until(lambda: street.door.arrived)
        assert set(street.door.refused) == {"it proved nothing within 0.2 s"}


def test_unauthenticated_connections_leave_most_descriptors_to_the_process(reactor):
    """With `ulimit -n 160` they take 40: starting a process of another host takes some, too."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (160, limits[1]))
        try:
            street = Street(reactor, stack)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for _ in range(MAX_HALF_OPEN):
            street.peer()
        street.door.turn_for(0.2)
        assert len(street.door.acceptor._half_open) == 40


def test_out_of_descriptors_it_does_not_spin(reactor, monkeypatch):
    """No peer can be sent away, so it looks again a few times a second, and serves when it can."""
    door = Door(reactor)
    tried = []
    accept = socket.socket.accept

    def no_more_files(listener):
        tried.append(listener)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", no_more_files)
    with socket.create_connection(door.address) as visitor:
        door.turn_until(lambda: tried)
        door.turn_for(0.5)
        assert len(tried) <= 6
        monkeypatch.setattr(socket.socket, "accept", accept)
        visitor.sendall(b"not a greeting" * 10)
        door.turn_until(lambda: door.refused)
    door.close()


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_connections_that_a_rank_gives_up_are_not_reported(reactor, encrypt):
    """Of several that it has opened it keeps one; the others end before the handshake, or during it."""
    with ExitStack() as stack:
        street = Street(reactor, stack, LONG_S, encrypt=encrypt)
        door, half_open = street.door, street.door.acceptor._half_open
        for named, abrupt in itertools.product((False, True), repeat=2):
            greeting = Initiator(KEY, CLAIM, place=place_of(*door.address)).greeting
            peer = street.peer((Admission.of(KEY) + HELLO if encrypt else greeting) if named else b"")
            door.turn_until(lambda named=named: [item for item in half_open if begun(item) == named])
            if abrupt:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.close()
            else:
                peer.shutdown(socket.SHUT_WR)
            door.turn_until(lambda: not half_open)
        assert door.refused == []
        assert door.acceptor._failed >= 4
        street.peer(b"GET / HTTP/1.1\r\n\r\n")
        door.turn_until(lambda: door.refused)
        assert len(door.refused) == 1


def begun(half_open):
    """Return whether the connection has named this job."""
    return half_open._heard and (half_open.responder.challenged or isinstance(half_open.sock, SecureSocket))


def test_processes_of_other_users_are_refused(reactor, monkeypatch):
    def another_user(sock):
        raise PermissionError(errno.EPERM, "it belongs to another user (number 7)")

    door = Door(reactor, listen(f"@ringcomm-test-{os.getpid()}-users"))
    monkeypatch.setattr(connect, "check_user", another_user)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(door.listener.getsockname())
        door.turn_until(lambda: door.refused)
        assert door.refused == ["it belongs to another user (number 7)"]
        assert peer.recv(1) == b""
    door.close()
    door.close()


class Street:
    """An acceptor with unauthenticated peers and ranks; a failed connection keeps its place for `place_s`."""

    def __init__(self, reactor, stack, place_s=0.0, encrypt=False):
        certificate = make_certificate() if encrypt else ""
        self.encryption = encryption_of(certificate)
        self.door = Door(reactor, place_s=place_s, certificate=certificate)
        self.stack = stack
        self.ends = []
        stack.callback(self.door.close)

    def peer(self, words=b""):
        sock = self.stack.enter_context(socket.socket())
        sock.setblocking(False)
        sock.connect_ex(self.door.address)
        if words:
            try:
                sock.send(words)
            except BlockingIOError:
                pass  # No peer keeps it waiting.
        return sock

    def time_passes(self):
        """Give all places back that failed connections have kept."""
        self.door.acceptor._failed = 0

    def rank(self):
        door, encryption = self.door, self.encryption
        Dial(door.reactor, door.address, KEY, CLAIM, self._ended, 30.0, encryption=encryption)

    def _ended(self, dial):
        self.ends.append(dial.reason)
        if dial.sock is not None:
            self.stack.enter_context(dial.sock)


# ---- the reactor and the dial --------------------------------------------------------------------


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
