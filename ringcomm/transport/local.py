"""Links between ranks of one host, of the best kind that both ends can have: :func:`make_links` tries each.

* :class:`ReadingLink`: each end reads the other's memory with ``process_vm_readv``, without a copy in
  between. The system permits it between processes of one user, unless a container or a security module
  forbids it. The receiver copies lent bytes directly to where they belong (or into a segment that stays in
  its cache, to be reduced), so they cross memory once instead of four times through a TCP stream. Short views
  take the ring.
* :class:`~.shm.SharedLink`: shared memory.
* :class:`~.tcp.SocketLink`: the Unix socket as a plain stream.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import socket
import struct
from contextlib import suppress
from typing import Any, Dict, Generator, List, Mapping, Optional, Sequence, Tuple

from ..errors import StartupError
from . import arena
from .base import address_of
from .shm import NEAR_BYTES, RING_BYTES, SMALL_RING_BYTES, Ring, SharedLink
from .tcp import SocketLink, choose_congestion

TOKEN_BYTES = 32
LEND_ABOVE_BYTES = 1536 * 1024
"""Longer views are lent: one copy, but the system looks every page up. Shorter ones take two copies in the
cache. Two ranks on two cores of an AMD EPYC are equally fast with about this much each way."""
_MANY_PEERS = 8
"""With this many peers on a host the rings are small where memory can be read: a megabyte each adds up."""
_TRIAL_S = 10.0


class _Span(ctypes.Structure):
    """C's ``struct iovec``."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _find() -> Optional[Any]:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError, TypeError):
        return None
    spans, number = ctypes.POINTER(_Span), ctypes.c_ulong
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, spans, number, spans, number, number]
    return function


_readv = _find()


def read_memory(pid: int, address: int, into: memoryview) -> None:
    """Fill the view with another process's bytes; OSError if it is gone, forbids it, or has no such memory.
    """
    if _readv is None:
        raise OSError("this system cannot read another process's memory")
    local, remote = _Span(address_of(into), into.nbytes), _Span(address, into.nbytes)
    count = _readv(pid, ctypes.pointer(local), 1, ctypes.pointer(remote), 1, 0)
    if count != into.nbytes:
        number = ctypes.get_errno() if count < 0 else errno.EFAULT
        raise OSError(number, os.strerror(number))


class ReadingLink(SharedLink):
    """A link to a rank whose memory may be read, and which may read ours: large views are lent wherever they
    lie. While anything is lent, all that follows is lent as well.
    """

    __slots__ = ("_pid",)

    # A read costs some 7 us however short it is, and as much again for every 64 KiB.
    segment_bytes = 1024 * 1024
    lends = True

    carrier = "each other's memory"

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        pid: int,  # of the other end
        outward: Ring,
        inward: Ring,
        own_arena: Optional[arena.Arena] = None,
        peer_arena: Optional[arena.PeerArena] = None,
    ) -> None:
        super().__init__(peer, sock, outward, inward, own_arena, peer_arena)
        self._pid = pid
        # A small ring is filled and emptied in turns: more than fits is better lent.
        self.lend_above(SMALL_RING_BYTES if outward.size == SMALL_RING_BYTES else LEND_ABOVE_BYTES)

    def _loan(self, data: memoryview) -> Optional[Tuple[int, int]]:
        loan = super()._loan(data)
        if loan is None and (self._lent or data.nbytes > self.ring_most_bytes):
            return address_of(data), data.nbytes
        return loan

    def _read_other(self, address: int, into: memoryview) -> None:
        read_memory(self._pid, address, into)


# -- which kind of link ----------------------------------------------------------------------------

_HELLO = struct.Struct(f"<Q{TOKEN_BYTES}s")
_SHARING = ("auto", "memory", "shm")
_STEPS = 5
"""Of :func:`_trial`."""
_REMEDY = {
    "memory": "this process and rank {peer} may not read each other's memory (a container, another user, or "
    "a security module forbids it); use 'auto' or 'shm'",
    "shm": "this process and rank {peer} found no memory to share (this system has none left, or a sandbox "
    "forbids it); use 'auto' or 'unix'",
}


def make_links(sockets: Mapping[int, socket.socket], transport: str = "auto") -> Dict[int, SocketLink]:
    """Make links over authenticated sockets, by peer, at the same time as all ranks of this host. OSError if
    a connection broke, StartupError if ``transport`` (``memory``, ``shm``) is impossible.
    """
    local = [peer for peer, sock in sockets.items() if sock.family == socket.AF_UNIX]
    trials = [_trial(peer, sockets[peer], transport, len(local)) for peer in local]
    links: Dict[int, SocketLink] = {}
    try:
        for _ in range(_STEPS):
            for trial in trials:
                link = next(trial)
                if link is not None:
                    links[link.peer] = link
        for peer, sock in sockets.items():
            if peer not in links:
                choose_congestion(sock)
                links[peer] = SocketLink(peer, sock)
            else:
                _check_wish(transport, links[peer])
    except BaseException:
        for trial in trials:
            trial.close()
        for link in links.values():
            link.close()
        raise
    return links


def _trial(
    peer: int, sock: socket.socket, wish: str, peers: int
) -> Generator[Optional[SocketLink], None, None]:
    """Yield, at last, the best link over a Unix socket that both ends can have. They may wish for different
    transports. All links take a step (to the next ``yield``) together, so that none waits for another.
    """
    rings: List[Ring] = []
    sock.settimeout(_TRIAL_S)
    try:
        random = memoryview(bytearray(os.urandom(TOKEN_BYTES)))
        sock.sendall(_HELLO.pack(address_of(random), bytes(random)))
        yield None
        address, token = _HELLO.unpack(_receive(sock, _HELLO.size))
        pid = _readable_pid(sock, address, token) if wish in ("auto", "memory") else 0
        sock.sendall(bytes([pid > 0]))
        yield None
        if not _receive(sock, 1)[0]:
            pid = 0
        offered: List[int] = []
        own = arena.own() if wish in _SHARING else None
        with suppress(OSError):  # no shared memory here: nothing is offered
            if wish in _SHARING:
                small = peers >= _MANY_PEERS and pid
                rings.append(Ring.make(SMALL_RING_BYTES if small else ring_bytes(peers)))
                offered = [rings[0].descriptor] + ([] if own is None else [own.descriptor])
        send_memory(sock, offered)
        yield None
        found = receive_memory(sock)
        peer_arena: Optional[arena.PeerArena] = None
        with suppress(OSError):
            if rings and found:
                rings.append(Ring(found.pop(0)))
                peer_arena = arena.of_peer(found.pop(0)) if found else None
        for descriptor in found:
            os.close(descriptor)
        sock.sendall(bytes([len(rings) == 2, peer_arena is not None]))
        yield None
        shares, has_own = _receive(sock, 2)
    except BaseException:
        for ring in rings:
            ring.close()
        raise
    if not shares or len(rings) < 2:
        for ring in rings:
            ring.close()
        yield SocketLink(peer, sock)
        return
    outward, inward = rings
    for ring in rings:
        ring.close_descriptor()
    if own is not None:
        own.has_peers |= bool(has_own)
    arenas = (own if has_own else None, peer_arena)
    if pid:
        yield ReadingLink(peer, sock, pid, outward, inward, *arenas)
    else:
        yield SharedLink(peer, sock, outward, inward, *arenas)


def _readable_pid(sock: socket.socket, address: int, token: bytes) -> int:
    """Return the process at the other end if its memory shows this token; 0 otherwise."""
    seen = bytearray(TOKEN_BYTES)
    with suppress(OSError, AttributeError):  # Not permitted, another pid namespace, a sandbox, not Linux.
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # type: ignore[attr-defined,unused-ignore]
        pid: int = struct.unpack("iII", peer)[0]
        read_memory(pid, address, memoryview(seen))
        return pid if seen == token else 0
    return 0


def ring_bytes(peers: int) -> int:
    """Return the size of a ring: a rank reads all of its rings in turn, so together they exceed its cache."""
    return max(NEAR_BYTES, RING_BYTES >> (peers - 1).bit_length())


def send_memory(sock: socket.socket, descriptors: Sequence[int]) -> None:
    """Send the number of descriptors in one byte, and the descriptors with it, through a Unix socket."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg([bytes([len(descriptors)])], rights)


def receive_memory(sock: socket.socket) -> List[int]:
    """Return the descriptors that :func:`send_memory` has sent, unless they are not all of sealed memory."""
    found = array.array("i")
    room = socket.CMSG_SPACE(2 * found.itemsize)
    number, extras, _, _ = sock.recvmsg(1, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    for level, kind, content in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) // found.itemsize * found.itemsize])
    if number and len(found) == number[0] and all(map(arena.is_sealed, found)):
        return list(found)
    for descriptor in found:
        os.close(descriptor)
    if not number:
        raise ConnectionError("it closed the connection")
    return []


def _receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return data


def _check_wish(transport: str, link: SocketLink) -> None:
    """Raise StartupError if a link within this host is not of the requested kind."""
    wanted = {"memory": ReadingLink, "shm": SharedLink}.get(transport)
    if wanted is not None and link.sock.family == socket.AF_UNIX and not isinstance(link, wanted):
        raise StartupError(
            f"transport '{transport}' was asked for, but {_REMEDY[transport].format(peer=link.peer)}"
        )
