"""Selects the transport between ranks of one host by trying each when a link is made: reading each other's
memory (:mod:`~ringcomm.transport.process_memory`), shared memory (:mod:`~ringcomm.transport.shm`), else the
Unix socket as a plain stream.
"""

from __future__ import annotations

import socket
import struct
from typing import Dict, Mapping, Optional

from ..errors import StartupError
from . import arena
from .carriers import measured
from .process_memory import TOKEN_BYTES, Lease, PeerMemory, ReadingLink, available
from .ring import NEAR_BYTES, RING_BYTES, SMALL_RING_BYTES, Ring, receive_memory, send_descriptor
from .shm import SharedLink
from .tcp import SocketLink, choose_congestion

_HELLO = struct.Struct(f"<Q{TOKEN_BYTES}s")
_YES, _NO = b"\x01", b"\x00"
_TRIAL_S = 10.0
_MANY_PEERS = 8
"""With this many peers on a host the rings are small where memory can be read: a megabyte each adds up."""

_REMEDY = {
    "memory": "this process and rank {peer} may not read each other's memory (a container, another user, or "
    "a security module forbids it); use 'auto' or 'shm'",
    "shm": "this process and rank {peer} found no memory to share (this system has none left, or a sandbox "
    "forbids it); use 'auto' or 'unix'",
}


class Trial:
    """Finds out, for one new Unix socket, what both ends can do. They may wish for different transports.

    All links take these steps together, so that none waits for another: :meth:`hello`, :meth:`try_to_read`,
    :meth:`offer_ring`, :meth:`try_to_share`, :meth:`offer_arena`, :meth:`take_arena`, :meth:`link`. The
    socket must be blocking, with a timeout. ``peers`` is the number of other ranks on this host.
    """

    def __init__(self, sock: socket.socket, wish: str, peers: int = 1) -> None:
        self._sock = sock
        self._peers = peers
        self._may_read = wish in ("auto", "memory")
        self._may_share = wish in ("auto", "memory", "shm")
        self._lease = Lease()
        self._memory: Optional[PeerMemory] = None
        self._outward: Optional[Ring] = None
        self._inward: Optional[Ring] = None
        self._shares = False
        self._arena: Optional[arena.Arena] = None
        self._peer_arena: Optional[arena.PeerArena] = None

    def hello(self) -> None:
        """Send the address and the random bytes of this link's lease in this process."""
        self._sock.sendall(_HELLO.pack(self._lease.address, self._lease.token))

    def try_to_read(self) -> None:
        """Try to read the other end's lease from its memory, and report whether that worked."""
        address, token = _HELLO.unpack(_receive(self._sock, _HELLO.size))
        if self._may_read and available() and hasattr(socket, "SO_PEERCRED"):
            try:
                credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                (pid, _, _) = struct.unpack("iII", credentials)
                memory = PeerMemory(pid, address, token)
                if memory.read(address, memoryview(bytearray(TOKEN_BYTES))):
                    self._memory = memory
            except OSError:
                pass  # Not permitted, another pid namespace, or a sandbox.
        self._sock.sendall(_NO if self._memory is None else _YES)

    def offer_ring(self) -> None:
        """Hand a ring of shared memory to the other end: a small one if both can read and have many peers."""
        if _receive(self._sock, 1) == _NO:
            self._memory = None
        small = self._peers >= _MANY_PEERS and self._memory is not None
        try:
            if self._may_share:
                self._outward = Ring.make(SMALL_RING_BYTES if small else ring_bytes(self._peers))
        except OSError:
            pass  # No shared memory here: the answer says so.
        if self._outward is None:
            self._sock.sendall(_NO)
        else:
            self._outward.pass_on(self._sock, _YES)

    def try_to_share(self) -> None:
        """Take over the other end's ring, and report whether that worked."""
        _, self._inward = Ring.take(self._sock)
        self._sock.sendall(_NO if self._inward is None else _YES)

    def offer_arena(self) -> None:
        """Hand this process's arena to the other end, if they share memory."""
        taken = _receive(self._sock, 1) == _YES
        self._shares = taken and self._outward is not None and self._inward is not None
        self._arena = arena.own() if self._shares else None
        if self._arena is None:
            self._sock.sendall(_NO)
        else:
            send_descriptor(self._sock, _YES, self._arena.descriptor)

    def take_arena(self) -> None:
        """Take over the other end's arena, and report whether that worked."""
        _, descriptor = receive_memory(self._sock)
        if descriptor is not None:
            self._peer_arena = arena.of_peer(descriptor)
        self._sock.sendall(_NO if self._peer_arena is None else _YES)

    def link(self, peer: int) -> SocketLink:
        """Return the best link that both ends can have."""
        if _receive(self._sock, 1) == _NO:
            self._arena = None
        elif self._arena is not None:
            self._arena.has_peers = True
        outward, inward = self._outward, self._inward
        if not self._shares or outward is None or inward is None:
            self.close()
            return SocketLink(peer, self._sock)
        arenas = (self._arena, self._peer_arena)
        if self._memory is None:
            return SharedLink(peer, self._sock, outward, inward, *arenas)
        return ReadingLink(peer, self._sock, self._memory, self._lease, outward, inward, *arenas)

    def close(self) -> None:
        """Release shared memory that no link has taken over."""
        for ring in (self._outward, self._inward):
            if ring is not None:
                ring.close()
        self._outward = self._inward = None


_STEPS = (
    Trial.hello, Trial.try_to_read, Trial.offer_ring, Trial.try_to_share, Trial.offer_arena, Trial.take_arena,
)  # fmt: skip


def ring_bytes(peers: int) -> int:
    """Return the size of a ring for a rank with this many peers on its host. A rank reads from all of its
    rings in turn, so they need not each be larger than its cache.
    """
    return max(NEAR_BYTES, RING_BYTES >> (peers - 1).bit_length())


def _receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return data


def make_links(
    sockets: Mapping[int, socket.socket],
    transport: str = "auto",
    measure: bool = True,  # find the fastest carrier of this machine, see :mod:`.carriers`
) -> Dict[int, SocketLink]:
    """Make links over authenticated sockets, by peer; those over Unix sockets use memory where both ends may.
    All ranks of a host must call this at the same time. Raises OSError if a connection broke, StartupError if
    ``transport`` (``memory``, ``shm``) is impossible.
    """
    trials: Dict[int, Trial] = {}
    peers = sum(sock.family == socket.AF_UNIX for sock in sockets.values())
    crowded = peers >= _MANY_PEERS
    for peer, sock in sockets.items():
        if sock.family != socket.AF_UNIX:
            choose_congestion(sock)
        else:
            sock.settimeout(_TRIAL_S)
            trials[peer] = Trial(sock, transport, peers)
    try:
        for step in _STEPS:
            for trial in trials.values():
                step(trial)
        links: Dict[int, SocketLink] = {}
        for peer, sock in sockets.items():
            links[peer] = trials[peer].link(peer) if peer in trials else SocketLink(peer, sock)
            _check_wish(transport, links[peer])
        for link in links.values():
            if isinstance(link, ReadingLink) and (crowded or measure):
                # A small ring is filled and emptied in turns: more than fits is better lent.
                link.lend_above(SMALL_RING_BYTES if crowded else measured())
    except BaseException:
        for trial in trials.values():
            trial.close()
        raise
    return links


def _check_wish(transport: str, link: SocketLink) -> None:
    """Raise StartupError if a link within this host is not of the requested kind."""
    wanted = {"memory": ReadingLink, "shm": SharedLink}.get(transport)
    if wanted is not None and link.sock.family == socket.AF_UNIX and not isinstance(link, wanted):
        raise StartupError(
            f"transport '{transport}' was asked for, but {_REMEDY[transport].format(peer=link.peer)}"
        )
