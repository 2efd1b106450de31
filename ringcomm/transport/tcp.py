"""Links over connected stream sockets (TCP or Unix)."""

from __future__ import annotations

import select
import socket
from typing import Dict, Mapping, Optional, Sequence

from .base import Fabric, Link, LinkClosed, Views, Watch

_MOST_VIEWS = 16


class SocketLink(Link):
    """A link over one connected stream socket, which it owns from now on."""

    __slots__ = ("_recv_into", "_recvmsg_into", "_send", "_sendmsg", "peer", "sock")

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer = peer
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

    def send(self, views: Views) -> int:
        try:
            if len(views) == 1:
                return self._send(views[0])
            return self._sendmsg(views[:_MOST_VIEWS])
        except BlockingIOError:
            return 0
        except InterruptedError:
            return 0
        except OSError as problem:
            raise LinkClosed(self.peer, _reason(problem)) from None

    def recv(self, views: Views) -> int:
        try:
            if len(views) == 1:
                got = self._recv_into(views[0])
            else:
                got = self._recvmsg_into(views[:_MOST_VIEWS])[0]
        except BlockingIOError:
            return 0
        except InterruptedError:
            return 0
        except OSError as problem:
            raise LinkClosed(self.peer, _reason(problem)) from None
        if got == 0 and any(view.nbytes for view in views):
            raise LinkClosed(self.peer, "it closed the connection")
        return got

    def close(self) -> None:
        self.sock.close()


def _reason(problem: OSError) -> str:
    return (problem.strerror or str(problem)).lower()


class SocketFabric(Fabric):
    """A socket to every other rank.

    Args:
        rank: this rank.
        sockets: by peer; every peer from 0 to ``size - 1`` except this rank.
        watch: interrupts waits.
    """

    def __init__(
        self, rank: int, sockets: Mapping[int, socket.socket], watch: Optional[Watch] = None
    ) -> None:
        self.rank = rank
        self.size = len(sockets) + 1
        self.watch = watch
        self._links: Dict[int, SocketLink] = {peer: SocketLink(peer, sock) for peer, sock in sockets.items()}

    def link(self, peer: int) -> Link:
        return self._links[peer]

    def wait(self, reading: Sequence[Link], writing: Sequence[Link], timeout_s: float) -> None:
        wanted: Dict[int, int] = {}
        if self.watch is not None and self.watch.fileno() >= 0:
            wanted[self.watch.fileno()] = select.POLLIN
        for link in reading:
            wanted[self._links[link.peer].sock.fileno()] = select.POLLIN
        for link in writing:
            descriptor = self._links[link.peer].sock.fileno()
            wanted[descriptor] = wanted.get(descriptor, 0) | select.POLLOUT
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        poller.poll(min(timeout_s, 3600.0) * 1000)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
