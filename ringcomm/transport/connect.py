"""Listens on and dials addresses, with the handshake, and names what a process lacks for that.

Accepting is in :mod:`.accept`.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import threading
import weakref
from contextlib import suppress
from typing import Any, Callable, List, Optional, Tuple

from ..errors import AuthenticationError, ProtocolError, RingcommError, StartupError
from ..wire.auth import NOWHERE, Admission, Claim, Initiator, OtherVersion, Session, parting_answer, place_of
from .reactor import READ, WRITE, Reactor
from .secure import ClosedEarly, Encryption, SecureSocket

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
    """Raise PermissionError if the other end of a Unix socket belongs to another user: the one who listened
    or connected, not the present owner of the descriptor.
    """
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
    """One attempt to connect to an address, with the handshake. Calls ``finished`` once: :attr:`sock` is an
    authenticated, non-blocking connection then, or :attr:`reason` says why there is none. Raises OSError if
    this process has no descriptors or memory left, also from the reactor.

    ``passage`` asks the relay at that address for a link; ``listens``: the other rank begins the handshake
    on it, so that the connection is not authenticated yet.
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
        self._initiator = Initiator(key, claim, binding=binding, place=place_of(*address))
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
            reason = str(problem.strerror or problem).lower()
            self._reactor.after(0.0, lambda: self.give_up(reason))
            return
        self._reactor.watch(sock, WRITE, lambda: self._connected(sock))

    def _drop(self, sock: socket.socket) -> None:
        self._socks.remove(sock)
        self._reactor.forget(sock)
        sock.close()

    def _drop_all(self) -> None:
        while self._socks:
            self._drop(self._socks[0])

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
            if _connected_to_itself(sock):
                raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
            if self._family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.local = str(sock.getsockname()[0]).split("%")[0]
            if self._head:
                sock.send(self._head)  # A fresh connection's send buffer holds these few bytes.
        except OSError as failure:
            self.give_up(str(failure.strerror or failure).lower())
            return
        self._got_it = True
        self._reactor.forget(sock)
        self._socks.remove(sock)
        self._drop_all()
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
            return
        except AuthenticationError as problem:
            self.refused_by_key = True
            self._say_why(sock, parting_answer(problem))
            self.give_up(str(problem))
            return
        except ProtocolError as problem:
            self.too_slow = isinstance(problem, ClosedEarly)
            self.other_version = isinstance(problem, OtherVersion)
            self.give_up(str(problem))
            return
        except OSError as problem:
            self.give_up(str(problem.strerror or problem).lower())
            return
        trust(sock)
        self._reactor.forget(sock)
        self._succeed(sock)

    def _succeed(self, sock: socket.socket) -> None:
        self._socks.clear()
        self._over = True
        self.sock = sock
        self._finished(self)

    def _say_why(self, sock: socket.socket, answer: bytes) -> None:
        """Tell the responder that this end refuses it, and does not just prefer another connection."""
        try:
            if answer and self._greeted:
                sock.send(answer)
        except OSError:
            pass  # It is refused in any case; the reason need not arrive.

    def give_up(self, reason: str) -> None:
        """End the attempt unless it has ended; ``reason`` goes into error texts."""
        if self._over:
            return
        self._over = True
        self.reason = reason
        self._drop_all()
        self._finished(self)


def trust(sock: socket.socket) -> None:
    """Lift the limits on what an authenticated peer may send, and keep the idle connection open."""
    if isinstance(sock, SecureSocket):
        sock.trust()
    keep_open(sock)


def keep_open(sock: socket.socket) -> None:
    """Have the system send a packet on a TCP connection that is idle for a minute: routers with NAT, and
    firewalls, forget one on which nothing passes for some minutes.
    """
    if sock.family == socket.AF_UNIX:
        return
    with suppress(OSError):  # it has just been reset, which the next receive reports
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPALIVE"):  # Linux, macOS
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), IDLE_S)


def _connected_to_itself(sock: socket.socket) -> bool:
    """Return whether TCP's simultaneous open connected the socket to itself. Dialling a free ephemeral port
    of this machine does that once in a while.
    """
    return bool(sock.getsockname() == sock.getpeername())


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
    """Raise OSError, and close the kept descriptors to report it with, if there are not enough for links to
    this many peers, and ``more``.
    """
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
