"""Listens on, dials and accepts connections, with the handshake, and names what a process lacks for that.

Until its handshake is done, a connection may send 200 bytes (8 KiB if it is encrypted) and take
:data:`HANDSHAKE_S` seconds. There are :data:`MAX_HALF_OPEN` places for such connections, at most a quarter
of the descriptors of this process. A connection that fails keeps its place for :data:`PLACE_S` seconds
more, which limits the failures per second: a refusal takes 40 to 60 us of a server's core, so this is 2 %
of it. TLS answers only after an :class:`~ringcomm.wire.auth.Admission`, which needs the key. While all
places are taken, connections wait in the system's backlog, which costs next to nothing;
:class:`Dial` tries again.

An authenticated connection gives up its place at once, so any number of ranks can connect at the same time.
A rank dials several addresses, or one several times, and keeps the first authenticated connection. So a
connection that its peer closes after sending nothing, or after naming this job, is not reported. A Unix
socket connection of another user of this machine is closed unread.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import threading
import weakref
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from ..errors import AuthenticationError, ProtocolError, RingcommError, StartupError
from ..wire import auth
from ..wire.auth import NOWHERE, Admission, Claim, Session, parting_answer, place_of
from .reactor import READ, WRITE, ClosedEarly, Encryption, Reactor, SecureSocket, error_text

ASK_AGAIN_S = 0.25
"""Seconds before a parallel attempt to connect starts."""
_CREDENTIALS = struct.Struct("iII")
BACKLOG = 512
"""Connections that the system keeps for a listener until they are accepted."""
IDLE_S = 60
NO_DESCRIPTORS_S = 0.1
"""Seconds without accepting when descriptors are used up: a listener stays readable."""


def is_local(address: str) -> bool:
    """Return whether an address names a Unix socket of this host: ``@`` and a name without a file."""
    return address.startswith("@")


def _endpoint(address: str, port: int, scope: int) -> Tuple[socket.AddressFamily, Any]:
    """Return the family of an address, and its socket address for bind and connect."""
    if is_local(address):
        return socket.AF_UNIX, "\0" + address[1:]
    if ":" in address:
        return socket.AF_INET6, (address, port, 0, scope)
    return socket.AF_INET, (address, port)


def place_here(sock: socket.socket) -> bytes:
    """Return this end's address as the other end would have dialled it, to be compared."""
    name: Any = sock.getsockname()
    if sock.family != socket.AF_UNIX:
        return place_of(str(name[0]), int(name[1]))
    if isinstance(name, bytes) and name.startswith(b"\0"):
        return place_of("@" + name[1:].decode("utf-8", "replace"), 0)
    return NOWHERE


def is_short_of_descriptors(problem: OSError) -> bool:
    """Return whether ``accept()`` failed because descriptors or memory are used up, and may succeed later."""
    return problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def check_user(sock: socket.socket) -> None:
    """Raise PermissionError if another user made the other end of a Unix socket."""
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return
    _, user, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to another user (number {user})")


def listen(address: str, scope: int = 0, port: int = 0) -> socket.socket:
    """Return a socket that listens on this address; OSError if the address or port is not available."""
    family, endpoint = _endpoint(address, port, scope)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(endpoint)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class Dial:
    """One attempt to connect to an address, with the handshake. Calls ``finished`` once, with :attr:`sock` or
    :attr:`reason`. OSError without descriptors or memory, also from the reactor.
    """

    def __init__(
        self,
        reactor: Reactor,
        address: Tuple[str, int],
        key: bytes,
        claim: Claim,
        finished: Callable[[Dial], None],
        timeout_s: float,  # for connecting and the handshake together
        scope: int = 0,  # the interface, for link-local addresses
        encryption: Optional[Encryption] = None,
        passage: bytes = b"",
        listens: bool = False,
    ) -> None:
        self.address = address
        self.sock: Optional[socket.socket] = None
        self.reason = ""
        self.local = ""  # this end's address, once it is connected by TCP
        self.refused_by_key = self.other_version = False
        self.no_answer = False  # nothing was received
        self.too_slow = False  # a time limit of either end; another attempt may succeed
        self._reactor = reactor
        self._finished = finished
        self._over = False
        self._timeout_s = timeout_s
        self._family, self._endpoint = _endpoint(*address, scope)
        self._encryption = encryption if self._family != socket.AF_UNIX else None
        binding = b"" if self._encryption is None else self._encryption.fingerprint
        self._initiator = auth.Initiator(key, claim, binding=binding, place=place_of(*address))
        self._head = passage + (b"" if self._encryption is None or listens else Admission.of(key))
        self._listens = listens
        self._greeted = False
        # The sockets of the first and of the last attempt to connect; then the one that is connected.
        self._socks: List[socket.socket] = []
        self._got_it = False
        self._ask()
        reactor.after(timeout_s, self._too_late)

    @property
    def session(self) -> Session:
        """Authenticates the messages on the connection."""
        return self._initiator.session

    def _ask(self) -> None:
        """Try to connect, and again every :data:`ASK_AGAIN_S` seconds. The system repeats its SYN packets
        only a few times and with growing intervals; while unauthenticated peers fill the listener's backlog,
        frequent attempts get a place sooner. The first socket stays open, for slow networks.
        """
        if self._over or self._got_it:
            return
        for sock in self._socks[1:]:
            self._drop(sock)
        self._reactor.after(ASK_AGAIN_S, self._ask)
        try:
            sock = socket.socket(self._family, socket.SOCK_STREAM)
            self._socks.append(sock)
            sock.setblocking(False)
            sock.connect(self._endpoint)
        except BlockingIOError:
            if self._family == socket.AF_UNIX:
                self._drop(sock)  # The backlog of the listener is full.
                return
        except OSError as problem:
            if is_short_of_descriptors(problem):
                raise  # no fault of the other end
            # Finish later: the caller has no reference to this object before the constructor returns.
            reason = error_text(problem)
            self._reactor.after(0.0, lambda: self.give_up(reason))
            return
        self._reactor.watch(sock, WRITE, lambda: self._connected(sock))

    def _drop(self, sock: socket.socket) -> None:
        self._socks.remove(sock)
        self._reactor.forget(sock)
        sock.close()

    def _too_late(self) -> None:
        self.no_answer = self.too_slow = not self._over
        self.give_up(f"no answer within {self._timeout_s:g} s")

    def _connected(self, sock: socket.socket) -> None:
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self.give_up(os.strerror(problem).lower())
            return
        try:
            check_user(sock)
            if sock.getsockname() == sock.getpeername():
                # TCP's simultaneous open does that once in a while to a free ephemeral port of this machine.
                raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
            if self._family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.local = str(sock.getsockname()[0]).split("%")[0]
            if self._head:
                sock.send(self._head)  # A fresh connection's send buffer holds these few bytes.
        except OSError as failure:
            self.give_up(error_text(failure))
            return
        self._got_it = True
        self._reactor.forget(sock)
        self._socks.remove(sock)
        for other in list(self._socks):
            self._drop(other)
        if self._listens:
            self._succeed(sock)
            return
        if self._encryption is not None:
            sock = self._encryption.wrap(sock, accepted=False)
        self._socks.append(sock)
        self._reactor.watch(sock, READ, lambda: self._readable(sock))
        self._readable(sock)

    def _readable(self, sock: socket.socket) -> None:
        try:
            if isinstance(sock, SecureSocket) and not sock.handshake():
                return
            if not self._greeted:
                self._greeted = True
                sock.send(self._initiator.greeting)
            while not self._initiator.done:
                data = sock.recv(self._initiator.needs)
                if not data:
                    raise ClosedEarly("it closed the connection during the handshake")
                answer = self._initiator.receive(data)
                if answer:
                    sock.send(answer)
        except (BlockingIOError, InterruptedError):
            pass
        except (AuthenticationError, ProtocolError) as problem:
            self.refused_by_key = isinstance(problem, AuthenticationError)
            self.too_slow = isinstance(problem, ClosedEarly)
            self.other_version = isinstance(problem, auth.OtherVersion)
            if self.refused_by_key and self._greeted:
                with suppress(OSError):  # It is refused in any case; the reason need not arrive.
                    sock.send(parting_answer(problem))
            self.give_up(str(problem))
        except OSError as problem:
            self.give_up(error_text(problem))
        else:
            trust(sock)
            self._reactor.forget(sock)
            self._succeed(sock)

    def _succeed(self, sock: socket.socket) -> None:
        self._socks.clear()
        self._over = True
        self.sock = sock
        self._finished(self)

    def give_up(self, reason: str) -> None:
        """End the attempt unless it has ended; ``reason`` goes into error texts."""
        if self._over:
            return
        self._over = True
        self.reason = reason
        for sock in list(self._socks):
            self._drop(sock)
        self._finished(self)


def trust(sock: socket.socket) -> None:
    """Lift the limits on what an authenticated peer may send, and keep the idle connection open."""
    if isinstance(sock, SecureSocket):
        sock.trust()
    keep_open(sock)


def keep_open(sock: socket.socket) -> None:
    """Have the system send a packet on an idle TCP connection once a minute, for routers and firewalls."""
    if sock.family == socket.AF_UNIX:
        return
    with suppress(OSError):  # it has just been reset, which the next receive reports
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPALIVE"):  # Linux, macOS
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), IDLE_S)


# -- accepting -------------------------------------------------------------------------------------

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
        self.responder = auth.Responder(acceptor.key, acceptor.job, binding=binding, place=place)
        self._heard = False

    def readable(self) -> None:
        try:
            joining, relay = self.acceptor.joining, self.acceptor.relay
            if joining is not None and not self._heard and self._joins():
                self.acceptor.hand_over(self, joining)
                return
            if self._encryption is not None:
                while self._admission.needs:
                    self._admission.receive(self._read(self._admission.needs))
                if self._admission.passage is not None:
                    if relay is None:
                        raise ProtocolError("it asks for a relay, and this process is none")
                    self.acceptor.hand_over(self, relay, self._admission.passage)
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
            pass
        except (ClosedEarly, ConnectionResetError, BrokenPipeError) as problem:
            # It has sent nothing, or has named this job (perhaps by a replay): it may be a rank.
            named = self.responder.challenged or isinstance(self.sock, SecureSocket)
            self.refuse(error_text(problem), silently=named or not self._heard)
        except (AuthenticationError, ProtocolError) as problem:
            self.refuse(str(problem), parting_answer(problem))
        except OSError as problem:
            self.refuse(error_text(problem))
        else:
            trust(self.sock)
            self.acceptor.hand_over(self, self.acceptor.arrived, self.responder.claim, self.responder.session)

    def _joins(self) -> bool:
        """Return whether it is a machine that joins the job; what it has sent stays unread."""
        return self.sock.recv(len(auth.JOIN_MAGIC), socket.MSG_PEEK) == auth.JOIN_MAGIC

    def _read(self, most: int) -> bytes:
        data = self.sock.recv(most)
        if not data:
            raise ClosedEarly(_CLOSED)
        self._heard = True
        return data

    def refuse(self, reason: str, answer: bytes = b"", silently: bool = False) -> None:
        self.acceptor.release(self)
        if answer:
            with suppress(OSError):  # It is refused in any case; the reason need not arrive.
                self.sock.send(answer)
                # Closing with bytes unread would reset the connection, and the answer might be lost.
                self.sock.recv(_DRAIN_BYTES)
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
            self._reactor.after(HANDSHAKE_S, partial(self._expire, half_open))

    def _expire(self, half_open: _HalfOpen) -> None:
        if half_open in self._half_open:
            half_open.refuse(f"it proved nothing within {HANDSHAKE_S:g} s")

    def hand_over(self, half_open: _HalfOpen, take: Callable[..., None], *more: object) -> None:
        """Give a connection to its user; its place is free now."""
        self.release(half_open)
        self._resume()
        take(half_open.sock, *more)

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


# -- what a process lacks ---------------------------------------------------------------------------

_OWN = 16
"""Descriptors that a rank needs for links besides those to its peers: listeners, selectors, wake-ups."""
_PER_PEER = 3
_SPARE = 8
"""Descriptors that are kept while there are links: enough to reach a rendezvous, and report a shortage."""
_spare: List[int] = []
_spare_users: weakref.WeakSet[object] = weakref.WeakSet()
_spare_lock = threading.Lock()
_DESCRIPTORS = (
    "a process may have {limit} open files there (`ulimit -n`), and they are used up. Raise that limit "
    "before the start (`ulimit -n 65536`; --ulimit nofile=65536 for a container, LimitNOFILE= for a service) "
    "or use fewer files and process groups at a time: a group takes {per_peer} per other rank and {own} more"
)
_REASONS = {
    errno.ENOMEM: "its memory is used up ({text}; see `free -m`, `ulimit -v` and a container's --memory). "
    "Use fewer ranks there, or smaller models and batches",
    errno.ENOSPC: "no space is left there ({text}; see `df -h /dev/shm /tmp`). Free some, or give a "
    "container more by --shm-size",
    errno.ENFILE: "all processes of that host have used up its open files (`sysctl fs.file-max`)",
    errno.ENOBUFS: "the memory of its network is used up ({text}; see `sysctl net.core net.ipv4.tcp_mem`)",
    errno.EDQUOT: "the user's disk quota is used up there ({text}; see `quota`)",
}
_THREADS = (
    "no thread can be started there (see `ulimit -u`, and pids.max or --pids-limit of a container). Raise "
    "that limit, or start fewer ranks and threads there"
)


def shortage_text(problem: BaseException) -> str:
    """Return what this process lacks according to an error, and the remedy; "" for other errors."""
    if isinstance(problem, MemoryError):
        return _REASONS[errno.ENOMEM].format(text="MemoryError")
    if isinstance(problem, RuntimeError) and "start new thread" in str(problem):
        return _THREADS
    if not isinstance(problem, OSError):
        return ""
    if problem.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return _DESCRIPTORS.format(limit=limit, per_peer=_PER_PEER, own=_OWN)
    text = f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
    return _REASONS.get(problem.errno or 0, "").format(text=text)


def shortage_error(problem: BaseException, rank: Optional[int], host: str) -> Optional[StartupError]:
    """Return the error of all ranks if a rank cannot connect because it lacks something; None otherwise."""
    lacking = "" if isinstance(problem, RingcommError) else shortage_text(problem)
    subject = f"A rank on {host}" if rank is None else f"Rank {rank} on {host}"
    return StartupError(f"{subject} cannot connect to the others: {lacking}.") if lacking else None


def check_descriptors(peers: int, more: int = 0) -> None:
    """Raise OSError if links need more descriptors than there are; the kept ones are free to report it."""
    with _spare_lock:
        try:
            _close(_opened(_OWN + _PER_PEER * peers + more))
        except OSError:
            _close(_spare)
            raise


def keep_spare(user: object) -> None:
    """Keep some descriptors, if there are enough, until :func:`drop_spare` of the last user."""
    with _spare_lock:
        _spare_users.add(user)
        if not _spare:
            with suppress(OSError):  # the next links will be too many
                _spare.extend(_opened(_SPARE))


def drop_spare(user: object) -> None:
    """Note that a user, which has links, needs no descriptors any more."""
    with _spare_lock:
        _spare_users.discard(user)
        if not _spare_users:
            _close(_spare)


def release_spare() -> None:
    """Close the kept descriptors, so that a shortage can be reported."""
    with _spare_lock:
        _close(_spare)


def _opened(count: int) -> List[int]:
    found: List[int] = []
    try:
        while len(found) < count:
            found.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        _close(found)
        raise
    return found


def _close(descriptors: List[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
