"""Accepts and authenticates connections, and limits what unauthenticated peers may cost meanwhile.

Each connection has its limits: until the handshake is done, at most 200 bytes are read (8 KiB, if they are
encrypted), for :data:`HANDSHAKE_S` seconds. There are limits for all connections together as well, because a
peer without the key may connect again and again while the ranks compute:

* At most :data:`MOST_HALF_OPEN` connections may be unauthenticated at a time, and at most a quarter of the
  descriptors that this process may have, so that it can still start others; the next one waits. While many
  are refused, one is closed for it: the oldest, preferably one that has not named this job, and of an address
  that holds more than :data:`SHARE` if there is one, but none that is younger than :data:`GRACE_S`. A rank
  needs less than that for its handshake, on a slow network too.
* At most :data:`REFUSALS_PER_S` connections may fail in a second, after :data:`REFUSALS_AT_ONCE` at first.
  Then none is accepted until there are tokens again: the system keeps a few in its backlog and lets the rest
  try again, which costs next to nothing. A refusal took 40 to 60 us on a server's core, so this is 2 % of
  it; one after an answer by TLS took :data:`ENCRYPTED_COSTS` times as long, and costs as many tokens. TLS
  answers only after an :class:`~ringcomm.wire.auth.Admission`, which no process without the key can make.
* When many have failed lately, unauthenticated connections are served every :data:`LOOK_EVERY_S` seconds
  instead of at once. Wake-ups are the larger part of the cost for ranks that compute, so a peer that
  sends a byte at a time causes one for several bytes.
* A connection of another user of this machine to a Unix socket is closed unread.
* A rank dials several addresses, or one several times, and keeps the first connection that is authenticated.
  So a connection whose other end closes it after it has sent nothing, or has named this job, is not reported
  as refused unless many fail. It costs tokens like any other.

An authenticated connection costs no tokens. So ranks that connect at the same time, however many, do not
wait; only while many connections are refused they may have to try again, which :class:`~.connect.Dial` does.
"""

from __future__ import annotations

import resource
import selectors
import socket
from collections import Counter
from functools import partial
from typing import Callable, Dict, Optional, Sequence, Set

from ..clock import monotonic
from ..errors import AuthenticationError, ProtocolError
from ..wire.auth import Admission, Claim, Responder, parting_answer
from ..wire.signing import Session
from .connect import (
    BACKLOG,
    NO_DESCRIPTORS_S,
    check_user,
    is_short_of_descriptors,
    place_here,
    trust,
)  # fmt: skip
from .rate_limit import TokenBucket
from .reactor import READ, Reactor
from .secure import ClosedEarly, Encryption, SecureSocket

HANDSHAKE_S = 2.0
MOST_HALF_OPEN = 128
SHARE = 32
"""Where places are short, an address that holds more than so many gives one up first."""
GRACE_S = 0.5
REFUSALS_PER_S = 400
REFUSALS_AT_ONCE = 400
ENCRYPTED_COSTS = 8
CLOSED_COSTS = 0.2
"""What is closed unread costs a fifth of what reading its first bytes does."""
LOOK_EVERY_S = 0.1
_TOLERATED_PER_S = 50
"""This many failures in a second may be accidents, and change nothing."""
_ACCEPTS_AT_ONCE = 256
_CROWDED_BACKLOG = 64
"""The listeners' backlog while none is accepted: connections before a rank's are served before it."""
_SOON_S = 0.005
_DRAIN_BYTES = 4096
_CLOSED = "it closed the connection before it had proven anything"


def _places() -> int:
    """How many connections may be unauthenticated at a time in this process."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_HALF_OPEN if descriptors < 0 else min(MOST_HALF_OPEN, max(1, descriptors // 4))


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
        """Whether it has named this job, though perhaps by a copy of what a rank has sent."""
        return self.responder.challenged or isinstance(self.sock, SecureSocket)

    @property
    def costs(self) -> int:
        """How many tokens it costs if it fails."""
        return ENCRYPTED_COSTS if isinstance(self.sock, SecureSocket) and self.sock.answered else 1

    def readable(self) -> None:
        try:
            if self._encryption is not None:
                self._encrypt(self._encryption)
            if isinstance(self.sock, SecureSocket) and not self.sock.handshake():
                return
            while not self.responder.done:
                answer = self.responder.receive(self._read(self.responder.needs))
                if answer:
                    # A fresh connection's send buffer holds these few bytes; if not, it is no peer.
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
        """Begin with TLS as soon as the other end is admitted."""
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
    """Accepts on several listeners and hands over connections once they are authenticated.

    Args:
        key, job: what they must prove to hold, and the digest of the job they must mean.
        arrived: called with each proven connection (non-blocking), its claim, and what authenticates the
            messages on it.
        refused: called with the address and the reason for each that failed.
        encryption: for all connections but those over Unix sockets; None: for none.
        allowance: limits the rate of refusals; None: :data:`REFUSALS_PER_S`.
        forwarded: whether connections may have been dialled at another address or port than they arrive at.

    Attributes:
        admitted: the nonces of the admissions to TLS so far.
        kept_waiting: whether a peer may have had to wait because of refused ones; the reader resets it.
    """

    def __init__(
        self,
        reactor: Reactor,
        listeners: Sequence[socket.socket],
        key: bytes,
        job: bytes,
        arrived: Callable[[socket.socket, Claim, Session], None],
        refused: Callable[[str, str], None],
        encryption: Optional[Encryption] = None,
        allowance: Optional[TokenBucket] = None,
        forwarded: bool = False,
    ) -> None:
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
        self.admitted: Set[bytes] = set()
        self._allowance = allowance or TokenBucket(REFUSALS_PER_S, REFUSALS_AT_ONCE)
        self._tolerated = TokenBucket(_TOLERATED_PER_S, _TOLERATED_PER_S)
        self._no_descriptors_until_s = 0.0
        self.kept_waiting = False
        self._resting = self._was_exhausted = False
        self._sweeping = False
        # All that is unproven has a selector of its own, so that all of it can be left alone for a while.
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            self._selector.register(listener, READ, partial(self._accept, listener))
        reactor.watch(self._selector, READ, self._look)

    @property
    def shut(self) -> bool:
        """Whether no connection is accepted now."""
        return self._exhausted or not self._room()

    @property
    def _exhausted(self) -> bool:
        """Whether the tokens for refusals are used up, or file descriptors are."""
        return self._allowance.left <= 0 or monotonic() < self._no_descriptors_until_s

    @property
    def _many_refusals(self) -> bool:
        """Whether more than a few have failed lately."""
        return self._tolerated.left <= 0

    def _look(self) -> None:
        """Go on with all that is unproven, and decide when to look again."""
        if not self._listeners:
            return  # An alarm that was set before all was closed.
        for key, _ in self._selector.select(0):
            # What was done for one may have closed another.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        if not self._listeners:
            return
        exhausted, many_refusals, full = self._exhausted, self._many_refusals, not self._room()
        self.kept_waiting |= exhausted or (many_refusals and full)
        if exhausted != self._was_exhausted:
            self._was_exhausted = exhausted
            for listener in self._listeners:
                listener.listen(_CROWDED_BACKLOG if exhausted else BACKLOG)
        if exhausted or many_refusals or full:
            # Connections in the backlog would wake this thread all the time. The pause is short unless many
            # connections are refused.
            self._resting = True
            self._reactor.forget(self._selector)
            self._reactor.after(LOOK_EVERY_S if exhausted or many_refusals else _SOON_S, self._look)
        elif self._resting:
            self._resting = False
            self._reactor.watch(self._selector, READ, self._look)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if self.shut:
                return
            try:
                sock, origin = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                if not is_short_of_descriptors(problem):
                    raise
                # Out of descriptors: close the oldest unauthenticated connection and try again next time. If
                # there is none, pause for a moment: the listener stays readable, and would cause a busy loop.
                if not self._evict():
                    self._no_descriptors_until_s = monotonic() + NO_DESCRIPTORS_S
                return
            sock.setblocking(False)
            try:
                check_user(sock)
            except OSError as problem:
                sock.close()
                self._allowance.spend(CLOSED_COSTS)
                self._refused("this host", str(problem.strerror))
                continue
            if len(self._half_open) >= self._places:
                self._evict()
            half_open = _HalfOpen(self, sock, str(origin[0]) if origin else "this host")
            self._half_open[half_open] = None
            # Most have sent something already, and are through or refused before there is need to watch.
            half_open.readable()
            if half_open in self._half_open:
                self._wait_for(half_open)

    def _wait_for(self, half_open: _HalfOpen) -> None:
        """Go on with a connection when more has come; not for ever."""
        half_open.watched = True
        self._selector.register(half_open.sock, READ, half_open.readable)
        if not self._sweeping:
            self._sweeping = True
            self._reactor.after(HANDSHAKE_S, self._sweep)

    def _oldest(self) -> Optional[_HalfOpen]:
        """The oldest connection, one that has not named this job if possible.

        If an address holds more than its share, the oldest of that address.
        """
        without_job = [item for item in self._half_open if not item.named_job]
        held = Counter(item.origin for item in without_job)
        ((most, count),) = held.most_common(1) or [("", 0)]
        if count > SHARE:
            return next(item for item in without_job if item.origin == most)
        return next(iter(without_job), None) or next(iter(self._half_open), None)

    def _room(self) -> bool:
        """Whether one more may be accepted, if need be in the place of one older than :data:`GRACE_S`."""
        if len(self._half_open) < self._places:
            return True
        oldest = self._oldest() if self._many_refusals else None
        return oldest is not None and oldest.since_s + GRACE_S <= monotonic()

    def _evict(self) -> bool:
        """Close the oldest connection; whether there was any."""
        victim = self._oldest()
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
        """A connection has been refused: take tokens for it.

        Args:
            half_open: the connection.
            reason: why.
            given_up: whether the other end has closed it as a rank does that another connection has made it
                superfluous to: that is reported only where many come.
        """
        self._allowance.spend(half_open.costs)
        self._tolerated.spend(1)
        if not given_up or self._many_refusals:
            self._refused(half_open.origin, reason)

    def release(self, half_open: _HalfOpen) -> None:
        """Stop watching a connection: it is authenticated, or refused."""
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
