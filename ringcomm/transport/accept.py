"""Accept and authenticate connections, and limit what unauthenticated peers cost.

Until its handshake is done, a connection may send 200 bytes (8 KiB if it is encrypted) and take
:data:`HANDSHAKE_S` seconds. There are :data:`MAX_HALF_OPEN` places for such connections, at most a quarter
of the descriptors of this process. A connection that fails keeps its place for :data:`PLACE_S` seconds
more, which limits the failures per second: a refusal takes 40 to 60 us of a server's core, so this is 2 %
of it. TLS answers only after an :class:`~ringcomm.wire.auth.Admission`, which needs the key. While all
places are taken, connections wait in the system's backlog, which costs next to nothing;
:class:`~.connect.Dial` tries again.

An authenticated connection gives up its place at once, so any number of ranks can connect at the same time.
A rank dials several addresses, or one several times, and keeps the first authenticated connection. So a
connection that its peer closes after sending nothing, or after naming this job, is not reported. A Unix
socket connection of another user of this machine is closed unread.
"""

from __future__ import annotations

import errno
import resource
import socket
from collections import Counter
from functools import partial
from typing import Callable, Dict, Optional, Sequence, Set

from ..errors import AuthenticationError, ProtocolError
from ..wire.auth import JOIN_MAGIC, Admission, Claim, Responder, parting_answer
from ..wire.signing import Session
from .connect import check_user, is_short_of_descriptors, place_here, trust
from .reactor import READ, Reactor
from .secure import ClosedEarly, Encryption, SecureSocket

HANDSHAKE_S = 2.0
MAX_HALF_OPEN = 128
PLACE_S = 0.3
"""How long a failed connection keeps its place: 427 can fail in a second."""
PAUSE_S = 0.1
"""How long nothing is accepted once all places are taken: each wake-up disturbs a rank that computes."""
_DRAIN_BYTES = 4096
_PENDING = {
    errno.ENETDOWN, errno.EPROTO, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH,
    errno.EPERM,
}  # fmt: skip
"""Errors of one new connection (or of a firewall) that Linux raises from accept(); the listener works."""
_CLOSED = "it closed the connection before it had proven anything"
_MAX_KINDS = 64
"""This many origins and reasons of refusals are counted apart; they must not fill the memory."""


class _HalfOpen:
    """An accepted connection that is not authenticated yet."""

    def __init__(self, acceptor: Acceptor, sock: socket.socket, origin: str) -> None:
        self.acceptor = acceptor
        self.sock = sock
        self.origin = origin
        self.watched = False
        # Nothing is made for TLS before the other end has shown that it may be part of the job.
        self._encryption = acceptor.encryption if sock.family != socket.AF_UNIX else None
        binding = b"" if self._encryption is None else self._encryption.fingerprint
        self._admission = Admission(acceptor.key, acceptor.admitted)
        # Inside TLS nothing between the two can read or change anything, so port forwarding does no harm.
        place = place_here(sock) if self._encryption is None else None
        self.responder = Responder(acceptor.key, acceptor.job, binding=binding, place=place)
        self._heard = False

    @property
    def _may_be_a_rank(self) -> bool:
        """Return whether it has sent nothing, or has named this job (perhaps by a replay)."""
        return not self._heard or self.responder.challenged or isinstance(self.sock, SecureSocket)

    def readable(self) -> None:
        try:
            if not self._heard and self.acceptor.takes_joining(self):
                return
            if self._encryption is not None:
                while self._admission.needs:
                    self._admission.receive(self._read(self._admission.needs))
                if self._admission.passage is not None:
                    self.acceptor.hand_over(self, self._admission.passage)
                    return
                self.sock, self._encryption = self._encryption.wrap(self.sock, accepted=True), None
            if isinstance(self.sock, SecureSocket) and not self.sock.handshake():
                return
            while not self.responder.done:
                answer = self.responder.receive(self._read(self.responder.needs))
                if answer:
                    # A new connection's send buffer holds these few bytes.
                    self.sock.send(answer)
        except (BlockingIOError, InterruptedError):
            return
        except (ClosedEarly, ConnectionResetError, BrokenPipeError) as problem:
            reason = str(getattr(problem, "strerror", None) or problem).lower()
            self.refuse(reason, silently=self._may_be_a_rank)
            return
        except (AuthenticationError, ProtocolError) as problem:
            self.refuse(str(problem), parting_answer(problem))
            return
        except OSError as problem:
            self.refuse(str(problem.strerror or problem).lower())
            return
        trust(self.sock)
        self.acceptor.authenticated(self)

    def _read(self, most: int) -> bytes:
        data = self.sock.recv(most)
        if not data:
            raise ClosedEarly(_CLOSED)
        self._heard = True
        return data

    def expire(self) -> None:
        """Close the connection if it has not authenticated itself in time."""
        if self.acceptor.has(self):
            self.refuse(f"it proved nothing within {HANDSHAKE_S:g} s")

    def refuse(self, reason: str, answer: bytes = b"", silently: bool = False) -> None:
        self.acceptor.release(self)
        if answer:
            try:
                self.sock.send(answer)
                # Closing with bytes unread would reset the connection, and the answer might be lost.
                self.sock.recv(_DRAIN_BYTES)
            except OSError:
                pass  # It is refused in any case; the reason need not arrive.
        self.sock.close()
        self.acceptor.failed(self.origin, "" if silently else reason)


class Acceptor:
    """Accepts on several listeners and hands over authenticated, non-blocking connections."""

    def __init__(
        self,
        reactor: Reactor,
        listeners: Sequence[socket.socket],
        key: bytes,
        job: bytes,
        arrived: Callable[[socket.socket, Claim, Session], None],
        refused: Callable[[str, str], None],
        encryption: Optional[Encryption] = None,
        place_s: float = PLACE_S,
        may_wait: bool = True,  # connections wait while descriptors are used up; else the reactor raises
    ) -> None:
        self._may_wait = may_wait
        self.key = key
        self.job = job
        self.encryption = encryption
        self.arrived = arrived
        self.relay: Optional[Callable[[socket.socket, Claim], None]] = None  # takes connections to be relayed
        self.joining: Optional[Callable[[socket.socket], None]] = None  # takes those of machines that join
        self._refused = refused
        self._reactor = reactor
        self._listeners = list(listeners)
        self._half_open: Dict[_HalfOpen, None] = {}
        self._failed = 0  # failed connections that still keep their places
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._places = MAX_HALF_OPEN if descriptors < 0 else min(MAX_HALF_OPEN, max(1, descriptors // 4))
        self._place_s = place_s
        self.admitted: Set[bytes] = set()  # nonces of the admissions to TLS so far
        self.kept_waiting = False  # whether refused peers may have delayed a rank; the reader resets it
        self._paused = True
        self._resume()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            for listener in self._listeners:
                self._reactor.watch(listener, READ, partial(self._accept, listener))

    def _pause(self) -> None:
        """Leave connections in the backlog, which would wake this thread all the time, for a moment."""
        if not self._paused:
            self._paused = True
            for listener in self._listeners:
                self._reactor.forget(listener)
            self._reactor.after(PAUSE_S, self._resume)

    def _accept(self, listener: socket.socket) -> None:
        while len(self._half_open) + self._failed < self._places:
            try:
                sock, origin = listener.accept()
                sock.setblocking(False)
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                if problem.errno in _PENDING:
                    self.failed("", "")
                    continue
                if not is_short_of_descriptors(problem) or not self._may_wait:
                    raise
                break
            try:
                check_user(sock)
            except OSError as problem:
                sock.close()
                self.failed("this host", str(problem.strerror))
                continue
            self.take(sock, str(origin[0]) if origin else "this host")
        self.kept_waiting |= self._failed > 0
        self._pause()

    def take(self, sock: socket.socket, origin: str) -> None:
        """Authenticate the other end of a connection, which has been accepted or comes from a relay."""
        half_open = _HalfOpen(self, sock, origin)
        self._half_open[half_open] = None
        # Most have sent something already, and are through or refused before there is need to watch.
        half_open.readable()
        if half_open in self._half_open:
            half_open.watched = True
            self._reactor.watch(half_open.sock, READ, half_open.readable)
            self._reactor.after(HANDSHAKE_S, half_open.expire)

    def has(self, half_open: _HalfOpen) -> bool:
        """Return whether a connection has been neither authenticated nor refused."""
        return half_open in self._half_open

    def authenticated(self, half_open: _HalfOpen) -> None:
        """Hand over a connection; its place is free now."""
        self.release(half_open)
        self._resume()
        self.arrived(half_open.sock, half_open.responder.claim, half_open.responder.session)

    def hand_over(self, half_open: _HalfOpen, passage: Claim) -> None:
        """Give a connection to the relay; ProtocolError if there is none here."""
        if self.relay is None:
            raise ProtocolError("it asks for a relay, and this process is none")
        self.release(half_open)
        self._resume()
        self.relay(half_open.sock, passage)

    def takes_joining(self, half_open: _HalfOpen) -> bool:
        """Hand over the connection of a machine that joins the job, unread; return whether it is one."""
        if self.joining is None or half_open.sock.recv(len(JOIN_MAGIC), socket.MSG_PEEK) != JOIN_MAGIC:
            return False
        self.release(half_open)
        self._resume()
        self.joining(half_open.sock)
        return True

    def failed(self, origin: str, reason: str) -> None:
        """Count a refused connection, and report it if there is a reason."""
        self._failed += 1
        self._reactor.after(self._place_s, self._give_place_back)
        if reason:
            self._refused(origin, reason)

    def _give_place_back(self) -> None:
        self._failed -= 1

    def release(self, half_open: _HalfOpen) -> None:
        """Stop watching a connection that is authenticated or refused."""
        self._half_open.pop(half_open, None)
        if half_open.watched:
            half_open.watched = False
            self._reactor.forget(half_open.sock)

    def close(self) -> None:
        """Close the listeners and all unauthenticated connections."""
        for listener in self._listeners:
            self._reactor.forget(listener)
            listener.close()
        self._listeners.clear()
        for half_open in list(self._half_open):
            self.release(half_open)
            half_open.sock.close()


class Refusals:
    """The number of refused connections, and the most frequent reason."""

    def __init__(self) -> None:
        self.total = 0
        self._kinds: Counter[str] = Counter()

    def add(self, origin: str, reason: str) -> None:
        """Count one more refused connection."""
        self.total += 1
        kind = f"{origin}: {reason}"
        if kind in self._kinds or len(self._kinds) < _MAX_KINDS:
            self._kinds[kind] += 1

    def clear(self) -> None:
        """Start again from zero."""
        self.total = 0
        self._kinds.clear()

    def __bool__(self) -> bool:
        return self.total > 0

    def __str__(self) -> str:
        """``12 connections (mostly 10.0.0.9: no answer)``, or "" if there was none."""
        if not self.total:
            return ""
        ((what, _),) = self._kinds.most_common(1)
        return f"{self.total} connection{'s' if self.total > 1 else ''} (mostly {what})"
