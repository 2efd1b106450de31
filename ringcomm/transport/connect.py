"""Connections as they come and go: accepting, dialling and proving, all in one thread.

Both sides keep to the same rule: until the handshake is done, at most 180 bytes are read (8 KiB, if they
are encrypted), within :data:`HANDSHAKE_S` seconds, from at most :data:`MOST_HALF_OPEN` connections at a
time. So whoever scans ports or sends garbage costs a little time and no memory.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from ..clock import monotonic
from ..errors import AuthenticationError, ProtocolError
from ..wire.auth import Claim, Initiator, Responder, parting_answer
from .reactor import READ, WRITE, Reactor
from .secure import Encryption, SecureSocket

HANDSHAKE_S = 2.0
MOST_HALF_OPEN = 128
_ACCEPTS_AT_ONCE = 64
_PAUSE_S = 0.1
_DRAIN_BYTES = 4096


def is_local(address: str) -> bool:
    """Whether an address names a Unix socket of this host: ``@`` and a name without a file."""
    return address.startswith("@")


def _endpoint(address: str, port: int, scope: int) -> Tuple[socket.AddressFamily, Any]:
    """The family of an address, and what sockets of that family are bound or connected to."""
    if is_local(address):
        return socket.AF_UNIX, "\0" + address[1:]
    if ":" in address:
        return socket.AF_INET6, (address, port, 0, scope)
    return socket.AF_INET, (address, port)


def listen(address: str, scope: int = 0, port: int = 0) -> socket.socket:
    """A socket that listens on this one address.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    family, endpoint = _endpoint(address, port, scope)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(endpoint)
        sock.listen(512)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class _HalfOpen:
    """An accepted connection that has not proven itself yet."""

    def __init__(self, acceptor: Acceptor, sock: socket.socket, origin: str) -> None:
        self.acceptor = acceptor
        self.sock = sock
        self.origin = origin
        encryption = acceptor.encryption if _crosses_wires(sock) else None
        binding = b""
        if encryption is not None:
            self.sock, binding = encryption.wrap(sock, accepted=True), encryption.fingerprint
        self.responder = Responder(acceptor.key, acceptor.job, binding=binding)
        self.since_s = monotonic()

    def readable(self) -> None:
        try:
            if isinstance(self.sock, SecureSocket) and not self.sock.handshake():
                return
            while not self.responder.done:
                data = self.sock.recv(self.responder.needs)
                if not data:
                    raise ProtocolError("it closed the connection before it had proven anything")
                answer = self.responder.receive(data)
                if answer:
                    # A fresh connection's send buffer holds these few bytes; if not, it is no peer.
                    self.sock.send(answer)
        except (BlockingIOError, InterruptedError):
            return
        except (AuthenticationError, ProtocolError) as problem:
            self.refuse(str(problem), parting_answer(problem))
            return
        except OSError as problem:
            self.refuse(str(problem.strerror or problem).lower())
            return
        _trust(self.sock)
        self.acceptor.release(self)
        self.acceptor.arrived(self.sock, self.responder.claim)

    def refuse(self, reason: str, answer: bytes = b"") -> None:
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
                pass  # It is refused anyway; whether it hears why is its own affair.
        self.sock.close()
        self.acceptor.refused(self.origin, reason)


class Acceptor:
    """Accepts on several listeners and hands over connections that have proven themselves.

    Args:
        key, job: what they must prove to hold, and the digest of the job they must mean.
        arrived: called with each proven connection (non-blocking) and its claim.
        refused: called with the address and the reason for each that failed.
        encryption: for all connections but those over Unix sockets; None: for none.
    """

    def __init__(
        self,
        reactor: Reactor,
        listeners: Sequence[socket.socket],
        key: bytes,
        job: bytes,
        arrived: Callable[[socket.socket, Claim], None],
        refused: Callable[[str, str], None],
        encryption: Optional[Encryption] = None,
    ) -> None:
        self.key = key
        self.job = job
        self.encryption = encryption
        self.arrived = arrived
        self.refused = refused
        self._reactor = reactor
        self._listeners = list(listeners)
        self._half_open: Dict[_HalfOpen, None] = {}
        self._sweeping = False
        for listener in self._listeners:
            self._watch(listener)

    def _watch(self, listener: socket.socket) -> None:
        self._reactor.watch(listener, READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, origin = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                if problem.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                # Out of descriptors: give back the oldest stranger's and try again next turn. If there is
                # none, look away for a moment: the listener stays readable, and would keep us busy.
                if not self._evict():
                    self._reactor.forget(listener)
                    self._reactor.after(_PAUSE_S, lambda: self._resume(listener))
                return
            sock.setblocking(False)
            if len(self._half_open) >= MOST_HALF_OPEN:
                self._evict()
            half_open = _HalfOpen(self, sock, str(origin[0]) if origin else "this host")
            self._half_open[half_open] = None
            self._reactor.watch(half_open.sock, READ, half_open.readable)
            if not self._sweeping:
                self._sweeping = True
                self._reactor.after(HANDSHAKE_S, self._sweep)
            half_open.readable()

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._watch(listener)

    def _evict(self) -> bool:
        """Close the oldest connection, one that has not named this job if possible; whether there was any."""
        strangers = (item for item in self._half_open if not item.responder.challenged)
        victim = next(strangers, None) or next(iter(self._half_open), None)
        if victim is not None:
            victim.refuse("too many unproven connections at once")
        return victim is not None

    def _sweep(self) -> None:
        """Close the connections that have not proven themselves in time."""
        limit = monotonic() - HANDSHAKE_S
        for half_open in [item for item in self._half_open if item.since_s <= limit]:
            half_open.refuse(f"it proved nothing within {HANDSHAKE_S:g} s")
        self._sweeping = bool(self._half_open)
        if self._sweeping:
            self._reactor.after(HANDSHAKE_S / 4, self._sweep)

    def release(self, half_open: _HalfOpen) -> None:
        """Let go of a connection: it is proven, or refused."""
        self._half_open.pop(half_open, None)
        self._reactor.forget(half_open.sock)

    def close(self) -> None:
        """Close the listeners and everything unproven."""
        for listener in self._listeners:
            self._reactor.forget(listener)
            listener.close()
        self._listeners.clear()
        for half_open in list(self._half_open):
            self.release(half_open)
            half_open.sock.close()


class Dial:
    """One attempt to reach an address and prove ourselves to whoever answers.

    Afterwards either :attr:`sock` is a proven, non-blocking connection, or :attr:`reason` says why
    there is none; :attr:`no_answer` whether that is because nobody said anything.

    Args:
        finished: called once, with this object.
        timeout_s: for connecting and for the handshake together.
        encryption: how connections of this job are encrypted, other than those over Unix sockets.
    """

    def __init__(
        self,
        reactor: Reactor,
        address: Tuple[str, int],
        key: bytes,
        claim: Claim,
        finished: Callable[[Dial], None],
        timeout_s: float,
        scope: int = 0,
        encryption: Optional[Encryption] = None,
    ) -> None:
        self.address = address
        self.sock: Optional[socket.socket] = None
        self.reason = ""
        self.refused_by_key = False
        self.no_answer = False
        self._reactor = reactor
        self._finished = finished
        self._over = False
        self._timeout_s = timeout_s
        family, endpoint = _endpoint(*address, scope)
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        binding = b""
        if encryption is not None and _crosses_wires(self._sock):
            self._sock, binding = encryption.wrap(self._sock, accepted=False), encryption.fingerprint
        self._initiator = Initiator(key, claim, binding=binding)
        self._greeted = False
        try:
            self._sock.connect(endpoint)
        except BlockingIOError:
            pass
        except OSError as problem:
            # Finish from the loop, not from the constructor: the caller has no name for us yet.
            reason = str(problem.strerror or problem).lower()
            self._sock.close()
            reactor.after(0.0, lambda: self.give_up(reason))
            return
        reactor.watch(self._sock, WRITE, self._connected)
        reactor.after(timeout_s, self._too_late)

    def _too_late(self) -> None:
        self.no_answer = not self._over
        self.give_up(f"no answer within {self._timeout_s:g} s")

    def _connected(self) -> None:
        problem = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self.give_up(_words(problem))
            return
        try:
            if _connected_to_itself(self._sock):
                raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
            if self._sock.family != socket.AF_UNIX:
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as failure:
            self.give_up(str(failure.strerror or failure).lower())
            return
        self._reactor.watch(self._sock, READ, self._readable)
        self._readable()

    def _readable(self) -> None:
        try:
            if isinstance(self._sock, SecureSocket) and not self._sock.handshake():
                return
            if not self._greeted:
                self._greeted = True
                self._sock.send(self._initiator.greeting)
            while not self._initiator.done:
                data = self._sock.recv(self._initiator.needs)
                if not data:
                    raise ProtocolError("it closed the connection during the handshake")
                answer = self._initiator.receive(data)
                if answer:
                    self._sock.send(answer)
        except (BlockingIOError, InterruptedError):
            return
        except AuthenticationError as problem:
            self.refused_by_key = True
            self.give_up(str(problem))
            return
        except ProtocolError as problem:
            self.give_up(str(problem))
            return
        except OSError as problem:
            self.give_up(str(problem.strerror or problem).lower())
            return
        _trust(self._sock)
        self._reactor.forget(self._sock)
        self._over = True
        self.sock = self._sock
        self._finished(self)

    def give_up(self, reason: str) -> None:
        """End the attempt, if it has not ended; ``reason`` is what others will read."""
        if self._over:
            return
        self._over = True
        self.reason = reason
        self._reactor.forget(self._sock)
        self._sock.close()
        self._finished(self)


def _crosses_wires(sock: socket.socket) -> bool:
    """Whether it may lead to another host. What stays in one is not encrypted."""
    return sock.family != socket.AF_UNIX


def _trust(sock: socket.socket) -> None:
    if isinstance(sock, SecureSocket):
        sock.trust()


def _words(number: int) -> str:
    return os.strerror(number).lower()


def _connected_to_itself(sock: socket.socket) -> bool:
    """Whether TCP's simultaneous open connected the socket to itself.

    Dialling a free ephemeral port of this very machine does that once in a while.
    """
    return bool(sock.getsockname() == sock.getpeername())
