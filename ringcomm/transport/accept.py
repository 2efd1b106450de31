"""Accept and authenticate connections, and limit what unauthenticated peers cost.

Until its handshake is done, a connection may send 200 bytes (8 KiB if it is encrypted) and take
:data:`HANDSHAKE_S` seconds. Three things limit all of them together, because a peer without the key may
connect again and again while the ranks compute:

* There are :data:`MAX_HALF_OPEN` places for unauthenticated connections, at most a quarter of the descriptors
  of this process. A connection that fails keeps its place for :data:`PLACE_S` seconds more, which limits the
  failures per second: a refusal takes 40 to 60 us of a server's core, so this is 2 % of it. TLS answers only
  after an :class:`~ringcomm.wire.auth.Admission`, which needs the key.
* Without a free place, and after many failures, nothing is accepted for :data:`PAUSE_S` seconds, or until a
  connection is authenticated: others wait in the system's backlog, which costs next to nothing, and then come
  together. Wake-ups are the larger part of the cost for ranks that compute.
* If connections that have not failed take all places, the oldest is closed for the next one, but none younger
  than :data:`GRACE_S`, and those that have named this job last: a rank names it with its first bytes.

An authenticated connection gives up its place at once, so any number of ranks can connect at the same time.
While many connections are refused they may have to try again, which :class:`~.connect.Dial` does.

A rank dials several addresses, or one several times, and keeps the first authenticated connection. So a
connection that its peer closes after sending nothing, or after naming this job, is reported as refused only
while there is no free place. A Unix socket connection of another user of this machine is closed unread.
"""

from __future__ import annotations

import errno
import resource
import socket
from collections import deque
from functools import partial
from typing import Callable, Deque, Dict, Optional, Sequence, Set

from ..clock import monotonic
from ..errors import AuthenticationError, ProtocolError
from ..wire.auth import Admission, Claim, Responder, parting_answer
from ..wire.signing import Session
from .connect import check_user, is_short_of_descriptors, place_here, trust
from .reactor import READ, Reactor
from .secure import ClosedEarly, Encryption, SecureSocket

HANDSHAKE_S = 2.0
MAX_HALF_OPEN = 128
PLACE_S = 0.3
"""How long a failed connection keeps its place: 427 can fail in a second."""
PAUSE_S = 0.1
GRACE_S = 0.5
"""Twice that for a connection that has named this job: many ranks may come to a busy machine at once."""
_TOLERATED = 15
"""Up to this many failures within :data:`PLACE_S` may be accidents."""
_DRAIN_BYTES = 4096
_PENDING = {
    errno.ENETDOWN, errno.EPROTO, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH,
    errno.EPERM,
}  # fmt: skip
"""Errors of one new connection (or of a firewall) that Linux raises from accept(); the listener works."""
_CLOSED = "it closed the connection before it had proven anything"


def _places() -> int:
    """Return the maximum number of unauthenticated connections of this process at a time."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_HALF_OPEN if descriptors < 0 else min(MAX_HALF_OPEN, max(1, descriptors // 4))


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
        self.since_s = monotonic()
        self._heard = False

    @property
    def named_job(self) -> bool:
        """Return whether it has named this job, though perhaps by a replay of a rank's bytes."""
        return self.responder.challenged or isinstance(self.sock, SecureSocket)

    def readable(self) -> None:
        try:
            if self._encryption is not None:
                self._admit()
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
            self.refuse(reason, given_up=self.named_job or not self._heard)
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

    def _admit(self) -> None:
        """Read what is sent ahead of TLS."""
        while self._admission.needs:
            self._admission.receive(self._read(self._admission.needs))

    def refuse(self, reason: str, answer: bytes = b"", given_up: bool = False) -> None:
        self.acceptor.release(self)
        if answer:
            try:
                if isinstance(self.sock, SecureSocket) and not self.sock.secured:
                    self.sock.send_plain(answer)
                else:
                    self.sock.send(answer)
                    # Closing with bytes unread would reset the connection, and the answer might be lost.
                    self.sock.recv(_DRAIN_BYTES)
            except OSError:
                pass  # It is refused in any case; the reason need not arrive.
        self.sock.close()
        self.acceptor.failed(self, reason, given_up)


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
        self._refused = refused
        self._reactor = reactor
        self._listeners = list(listeners)
        self._half_open: Dict[_HalfOpen, None] = {}
        self._places = _places()
        self.admitted: Set[bytes] = set()  # nonces of the admissions to TLS so far
        self._place_s = place_s
        self._failed_until_s: Deque[float] = deque()
        self.kept_waiting = False  # whether refused peers may have delayed a rank; the reader resets it
        self._paused = True
        self._resume()

    @property
    def shut(self) -> bool:
        """Return whether no connection is accepted now: all places are taken, and none can be given up."""
        if len(self._half_open) + self._failed < self._places:
            return False
        oldest = self._oldest()
        return oldest is None or monotonic() < oldest.since_s + GRACE_S * (2 if oldest.named_job else 1)

    @property
    def _failed(self) -> int:
        """Return the number of failed connections that still keep their places."""
        now_s = monotonic()
        while self._failed_until_s and self._failed_until_s[0] <= now_s:
            self._failed_until_s.popleft()
        return len(self._failed_until_s)

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            for listener in self._listeners:
                self._reactor.watch(listener, READ, partial(self._accept, listener))

    def _pause(self) -> None:
        """Leave connections in the backlog, which would wake this thread all the time, for a moment."""
        self.kept_waiting |= self.shut and self._failed > _TOLERATED
        if not self._paused:
            self._paused = True
            for listener in self._listeners:
                self._reactor.forget(listener)
            self._reactor.after(PAUSE_S, self._resume)

    def _accept(self, listener: socket.socket) -> None:
        while not self.shut:
            try:
                sock, origin = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as problem:
                if problem.errno in _PENDING:
                    self._keep_place()
                    continue
                if not is_short_of_descriptors(problem) or not self._may_wait:
                    raise
                # Out of descriptors: close the oldest unauthenticated connection and try again later.
                self._evict()
                self._pause()
                return
            sock.setblocking(False)
            try:
                check_user(sock)
            except OSError as problem:
                sock.close()
                self._keep_place()
                self._refused("this host", str(problem.strerror))
                continue
            if len(self._half_open) + self._failed >= self._places:
                self._evict()
            self.take(sock, str(origin[0]) if origin else "this host")
        if self.shut or self._failed > _TOLERATED:
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
            self._reactor.after(HANDSHAKE_S, partial(self._expire, half_open))

    def _oldest(self) -> Optional[_HalfOpen]:
        """Return the oldest connection that has not named this job; else the oldest of all."""
        without_job = next((item for item in self._half_open if not item.named_job), None)
        return without_job or next(iter(self._half_open), None)

    def _evict(self) -> None:
        """Close the oldest connection, if there is any, if possible one that has not named this job."""
        victim = self._oldest()
        if victim is not None:
            victim.refuse("too many unproven connections at once")

    def _expire(self, half_open: _HalfOpen) -> None:
        """Close a connection that has not authenticated itself in time."""
        if half_open in self._half_open:
            half_open.refuse(f"it proved nothing within {HANDSHAKE_S:g} s")

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

    def failed(self, half_open: _HalfOpen, reason: str, given_up: bool) -> None:
        """Count a refused connection and report it. ``given_up``: the other end closed it as a rank closes a
        superfluous connection; that is reported only while there is no free place.
        """
        self._keep_place()
        if not given_up or self.shut:
            self._refused(half_open.origin, reason)

    def _keep_place(self) -> None:
        self._failed_until_s.append(monotonic() + self._place_s)

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
