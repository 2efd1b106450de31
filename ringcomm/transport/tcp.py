"""Links over connected stream sockets (TCP or Unix)."""

from __future__ import annotations

import select
import socket
import struct
from typing import Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..wire.auth import Session
from .arena import HugePages
from .base import Fabric, Link, LinkClosed, Views, Watch
from .reactor import SecureSocket, WakeUp, error_text

_MAX_VIEWS = 16

STREAMS = ("a Unix socket", "TCP")
"""The carriers that pass every byte through the system."""
NEAR_US = 2000
_TCP_INFO = struct.Struct("@120xQ20xI16xQQ")


class Counted(NamedTuple):
    """The system's counters of a connection."""

    acked_bytes: int  # received by the other end
    busy_us: int  # something was in flight
    held_us: int  # of that, the other end took nothing
    round_trip_us: int  # the shortest so far


def counted(sock: socket.socket) -> Optional[Counted]:
    """Return the system's counters of a TCP connection; None where there are none (old kernels)."""
    try:
        # The first fields of Linux' struct tcp_info (tcp.h).
        which = socket.TCP_INFO  # type: ignore[attr-defined,unused-ignore]
        info = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, which, _TCP_INFO.size))
    except (AttributeError, OSError, struct.error):
        return None
    acked_bytes, round_trip_us, busy_us, held_us = info
    return Counted(acked_bytes, busy_us, held_us, round_trip_us)


def choose_congestion(sock: socket.socket) -> None:
    """Replace bbr as a TCP socket's congestion control where the peer is near. It paces packets to keep
    queues short, which costs half of the speed where there is no queue: in one room, and on the loopback.
    """
    if not hasattr(socket, "TCP_CONGESTION"):
        return
    try:
        current = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    except OSError:
        return  # A sandbox has one, and does not report which.
    seen = counted(sock)
    if not current.startswith(b"bbr") or (seen is not None and seen.round_trip_us > NEAR_US):
        return
    for name in (b"cubic", b"reno"):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return
        except OSError:
            continue  # Not loaded, or not allowed for this user: the next one, or none.


class SocketLink(Link):
    """A link over one connected stream socket, which it owns from now on."""

    lends = False  # whether the peer reads large pieces from this process's memory

    __slots__ = ("_recv_into", "_recvmsg_into", "_send", "_sendmsg", "peer", "session", "sock")

    def __init__(self, peer: int, sock: socket.socket, session: Optional[Session] = None) -> None:
        self.peer = peer
        self.session = session
        self.sock = sock
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Bound once: looking methods up costs a tenth of a small message.
        self._send = sock.send
        self._sendmsg = sock.sendmsg
        self._recv_into = sock.recv_into
        self._recvmsg_into = sock.recvmsg_into

    @property
    def carrier(self) -> str:
        """Return the name of the carrier, for people to read."""
        return STREAMS[self.sock.family != socket.AF_UNIX]

    def send(self, views: Views) -> int:
        try:
            if len(views) == 1:
                return self._send(views[0])
            return self._sendmsg(views[:_MAX_VIEWS])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as problem:
            raise LinkClosed(self.peer, error_text(problem)) from None

    def recv(self, views: Views) -> int:
        try:
            if len(views) == 1:
                got = self._recv_into(views[0])
            else:
                views = views[:_MAX_VIEWS]
                got = self._recvmsg_into(views)[0]
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as problem:
            raise LinkClosed(self.peer, error_text(problem)) from None
        if got == 0 and any(view.nbytes for view in views):
            raise LinkClosed(self.peer, "it closed the connection")
        return got

    def close(self) -> None:
        self.sock.close()

    def poll_events(self, reading: bool, writing: bool) -> int:
        """Return the events to poll the socket for, to move in these directions."""
        return (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0)

    def woken(self, events: int) -> None:  # noqa: B027 - most links have nothing to do
        """End the wait that :meth:`poll_events` was called for; poll() has reported these events."""

    def holds_bytes(self) -> bool:
        """Return whether bytes are buffered outside the system's buffers; ``poll()`` does not report them."""
        return isinstance(self.sock, SecureSocket) and self.sock.buffered()


class SocketFabric(Fabric):
    """A socket to every other rank."""

    def __init__(self, rank: int, links: Mapping[int, SocketLink], watch: Optional[Watch] = None) -> None:
        self.rank = rank
        self.size = len(links) + 1
        self.watch = watch
        self._links = dict(links)
        # Whether a peer reads this process's memory.
        self._pages = HugePages() if any(link.lends for link in links.values()) else None
        self._wake_up: Optional[WakeUp] = None

    def link(self, peer: int) -> Link:
        return self._links[peer]

    def prepare(self, address: int, nbytes: int) -> None:
        if self._pages is not None:
            self._pages.use(address, nbytes)

    def wait(self, reading: Sequence[Link], writing: Sequence[Link], timeout_s: float) -> None:
        wanted: Dict[int, int] = {}
        if self.watch is not None and self.watch.fileno() >= 0:
            wanted[self.watch.fileno()] = select.POLLIN
        receiving = {link.peer for link in reading}
        sending = {link.peer for link in writing}
        links = [self._links[peer] for peer in receiving | sending]
        for link in links:
            wanted[link.sock.fileno()] = link.poll_events(link.peer in receiving, link.peer in sending)
        wake_up = self._wake_up
        if wake_up is not None:
            wanted[wake_up.fileno()] = select.POLLIN
        if any(self._links[peer].holds_bytes() for peer in receiving):
            timeout_s = 0.0
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        ready = poller.poll(min(timeout_s, 3600.0) * 1000)
        reported = dict(ready)
        for link in links:
            link.woken(reported.get(link.sock.fileno(), 0))
        if wake_up is not None and wake_up.fileno() in reported:
            wake_up.clear()

    def make_wakeable(self) -> None:
        self._wake_up = WakeUp()

    def wake(self) -> None:
        wake_up = self._wake_up
        if wake_up is not None:
            wake_up.wake()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        wake_up, self._wake_up = self._wake_up, None
        if wake_up is not None:
            wake_up.close()


def delivered(fabric: Fabric) -> Dict[int, Tuple[int, float]]:
    """Return, by peer, the bytes delivered over TCP, and the seconds in which some were in flight and wanted.
    """
    found = {}
    for peer in range(fabric.size):
        link = fabric.link(peer) if peer != fabric.rank else None
        seen = counted(link.sock) if isinstance(link, SocketLink) else None
        if seen is not None:
            found[peer] = seen.acked_bytes, max(0, seen.busy_us - seen.held_us) / 1e6
    return found
