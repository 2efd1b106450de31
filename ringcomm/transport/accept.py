"""Accept and authenticate connections, and limit what unauthenticated peers cost.

Until its handshake is done, a connection may send 200 bytes (8 KiB if it is encrypted) and take
:data:`HANDSHAKE_S` seconds. There are limits for all connections together as well, because a peer without the
key may connect again and again while the ranks compute:

* There are :data:`MAX_HALF_OPEN` places for unauthenticated connections, at most a quarter of the descriptors
  of this process. A connection that fails keeps its place for :data:`PLACE_S` seconds more, which limits the
  failures per second; other connections wait in the system's backlog, which costs next to nothing. A refusal
  takes 40 to 60 us of a server's core, so this is 2 % of it. TLS answers only after an
  :class:`~ringcomm.wire.auth.Admission`, which needs the key.
* If all places are taken, the oldest connection that has not named this job is closed for the next one, but
  none younger than :data:`GRACE_S`: a rank names the job with its first bytes. A replay of a rank's bytes
  names it as well, so under many failures that protection ends if all have named it.
* After many recent failures, unauthenticated connections are served every :data:`LOOK_EVERY_S` seconds
  instead of at once: wake-ups are the larger part of the cost for ranks that compute.
* A Unix socket connection of another user of this machine is closed unread.
* A rank dials several addresses, or one several times, and keeps the first authenticated connection. So a
  connection that its peer closes after sending nothing, or after naming this job, is not reported as refused
  unless many fail. It keeps its place like any other.

An authenticated connection gives up its place at once, so any number of ranks can connect at the same time.
While many connections are refused they may have to try again, which :class:`~.connect.Dial` does.
"""

from __future__ import annotations

import errno
import resource
import selectors
import socket
from collections import deque
from functools import partial
from typing import Callable, Deque, Dict, Optional, Sequence, Set

from ..clock import monotonic
from ..errors import AuthenticationError, ProtocolError
from ..wire.auth import Admission, Claim, Responder, parting_answer
from ..wire.signing import Session
from .connect import BACKLOG, check_user, is_short_of_descriptors, place_here, trust
from .reactor import READ, Reactor
from .secure import ClosedEarly, Encryption, SecureSocket

HANDSHAKE_S = 2.0
MAX_HALF_OPEN = 128
PLACE_S = 0.3
"""How long a failed connection keeps its place: 427 can fail in a second."""
GRACE_S = 0.5
LOOK_EVERY_S = 0.1
_TOLERATED = 15
"""Up to this many failures within :data:`PLACE_S` may be accidents and change nothing."""
_ACCEPTS_AT_ONCE = 256
_CROWDED_BACKLOG = 64
"""The listeners' backlog while many connections fail: connections before a rank's are served before it."""
_POLL_S = 0.01
"""Polling interval where the system has neither epoll nor kqueue."""
_SOON_S = 0.005
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
        place = None if acceptor.forwarded else place_here(sock)
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
                self._encrypt(self._encryption)
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
        self.acceptor.release(self)
        self.acceptor.arrived(self.sock, self.responder.claim, self.responder.session)

    def _read(self, most: int) -> bytes:
        data = self.sock.recv(most)
        if not data:
            raise ClosedEarly(_CLOSED)
        self._heard = True
        return data

    def _encrypt(self, encryption: Encryption) -> None:
        """Start TLS as soon as the other end is admitted."""
        while self._admission.needs:
            self._admission.receive(self._read(self._admission.needs))
        self.sock = encryption.wrap(self.sock, accepted=True)
        self._encryption = None

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
        forwarded: bool = False,  # connections may arrive at another address or port than was dialled
        may_wait: bool = True,  # connections wait while descriptors are used up; else the reactor raises
    ) -> None:
        self._may_wait = may_wait
        self.key = key
        self.forwarded = forwarded
        self.job = job
        self.encryption = encryption
        self.arrived = arrived
        self._refused = refused
        self._reactor = reactor
        self._listeners = list(listeners)
        self._half_open: Dict[_HalfOpen, None] = {}
        self._places = _places()
        self.admitted: Set[bytes] = set()  # nonces of the admissions to TLS so far
        self._place_s = place_s
        self._failed_until_s: Deque[float] = deque()
        self.kept_waiting = False  # whether refused peers may have delayed a rank; the reader resets it
        self._resting = self._sweeping = self._was_crowded = False
        # Unauthenticated connections have their own selector, so that they can be ignored for a while.
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            self._selector.register(listener, READ, partial(self._accept, listener))
        self._watch()

    @property
    def shut(self) -> bool:
        """Return whether no connection is accepted now: all places are taken, and none can be given up."""
        if len(self._half_open) + self._failed < self._places:
            return False
        oldest = self._oldest()
        return oldest is None or monotonic() < oldest.since_s + GRACE_S

    @property
    def _failed(self) -> int:
        """Return the number of failed connections that still keep their places."""
        now_s = monotonic()
        while self._failed_until_s and self._failed_until_s[0] <= now_s:
            self._failed_until_s.popleft()
        return len(self._failed_until_s)

    @property
    def _crowded(self) -> bool:
        return self._failed > _TOLERATED

    def _look(self) -> None:
        """Serve all unauthenticated connections, and decide when to look again."""
        if not self._listeners:
            return  # An alarm that was set before all was closed.
        for key, _ in self._selector.select(0):
            # Serving one may have closed another.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        if not self._listeners:
            return
        crowded, shut = self._crowded, self.shut
        self.kept_waiting |= crowded and shut
        if crowded != self._was_crowded:
            self._was_crowded = crowded
            for listener in self._listeners:
                listener.listen(_CROWDED_BACKLOG if crowded else BACKLOG)
        if crowded or shut:
            # Connections in the backlog would wake this thread all the time. The pause is short unless many
            # connections are refused.
            self._resting = True
            self._reactor.forget(self._selector)
            self._reactor.after(LOOK_EVERY_S if crowded else _SOON_S, self._look)
        elif self._resting or not hasattr(self._selector, "fileno"):
            self._resting = False
            self._watch()

    def _watch(self) -> None:
        """Look when something is ready; without epoll and kqueue (selectors have no descriptor), soon."""
        if hasattr(self._selector, "fileno"):
            self._reactor.watch(self._selector, READ, self._look)
        else:
            self._reactor.after(_POLL_S, self._look)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if self.shut:
                return
            try:
                sock, origin = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                if problem.errno in _PENDING:
                    self._keep(1)
                    continue
                if not is_short_of_descriptors(problem) or not (self._may_wait or self._crowded):
                    raise
                # Out of descriptors: close the oldest unauthenticated connection and try again next time. If
                # there is none, all places count as taken for a moment: the listener stays readable, and
                # would cause a busy loop.
                if not self._evict():
                    self._keep(self._places)
                return
            sock.setblocking(False)
            try:
                check_user(sock)
            except OSError as problem:
                sock.close()
                self._keep(1)
                self._refused("this host", str(problem.strerror))
                continue
            if len(self._half_open) + self._failed >= self._places:
                self._evict()
            half_open = _HalfOpen(self, sock, str(origin[0]) if origin else "this host")
            self._half_open[half_open] = None
            # Most have sent something already, and are through or refused before there is need to watch.
            half_open.readable()
            if half_open in self._half_open:
                self._wait_for(half_open)

    def _wait_for(self, half_open: _HalfOpen) -> None:
        """Continue with a connection when more bytes arrive, until the handshake's time limit."""
        half_open.watched = True
        self._selector.register(half_open.sock, READ, half_open.readable)
        if not self._sweeping:
            self._sweeping = True
            self._reactor.after(HANDSHAKE_S, self._sweep)

    def _oldest(self) -> Optional[_HalfOpen]:
        """Return the oldest connection that has not named this job; else, if many fail, the oldest of all."""
        without_job = next((item for item in self._half_open if not item.named_job), None)
        return without_job or (next(iter(self._half_open), None) if self._crowded else None)

    def _evict(self) -> bool:
        """Close the oldest connection, if possible one that has not named this job; return whether any."""
        victim = self._oldest() or next(iter(self._half_open), None)
        if victim is not None:
            victim.refuse("too many unproven connections at once")
        return victim is not None

    def _sweep(self) -> None:
        """Close the connections that have not authenticated themselves in time."""
        limit = monotonic() - HANDSHAKE_S
        for half_open in [item for item in self._half_open if item.since_s <= limit]:
            half_open.refuse(f"it proved nothing within {HANDSHAKE_S:g} s")
        self._sweeping = bool(self._half_open)
        if self._sweeping:
            self._reactor.after(HANDSHAKE_S / 4, self._sweep)

    def failed(self, half_open: _HalfOpen, reason: str, given_up: bool) -> None:
        """Count a refused connection and report it. ``given_up``: the other end closed it as a rank closes a
        superfluous connection; that is reported only where many fail.
        """
        self._keep(1)
        if not given_up or self._crowded:
            self._refused(half_open.origin, reason)

    def _keep(self, places: int) -> None:
        self._failed_until_s.extend([monotonic() + self._place_s] * places)

    def release(self, half_open: _HalfOpen) -> None:
        """Stop watching a connection that is authenticated or refused."""
        self._half_open.pop(half_open, None)
        if half_open.watched:
            half_open.watched = False
            self._selector.unregister(half_open.sock)

    def close(self) -> None:
        """Close the listeners and all unauthenticated connections."""
        if not self._listeners:
            return
        self._reactor.forget(self._selector)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for half_open in list(self._half_open):
            self.release(half_open)
            half_open.sock.close()
        self._selector.close()
