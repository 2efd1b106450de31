"""Links between ranks of one host: small messages through a Unix socket, large ones straight from
the sender's memory.

What travels on the socket are frames of a 16-byte head, and for small messages the bytes::

    INLINE  length             the bytes follow
    OFFER   length, address    so many bytes lie there in the sender's memory: come and read them
    TAKEN   length             so many of the offered bytes have been read and may be overwritten

The receiver copies offered bytes directly to where they belong (or into a segment that stays in
its cache, to be reduced), so they cross memory once instead of four times through a TCP stream.
Whether the system permits that is found out by trying, when the link is made; where it does not,
:class:`~ringcomm.transport.tcp.SocketLink` uses the same Unix socket as a plain stream.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from typing import Deque, Dict, List, Mapping, Optional, Tuple

from ..errors import StartupError
from .base import LinkClosed, Views
from .tcp import SocketLink, choose_congestion, closed_reason
from .vm import PeerMemory, address_of, available

_FRAME = struct.Struct("<QQ")
HEAD_BYTES = _FRAME.size
_INLINE, _OFFER, _TAKEN = 1, 2, 3
_KIND_SHIFT = 56
_LENGTH_MASK = (1 << _KIND_SHIFT) - 1

INLINE_MOST_BYTES = 16 * 1024
"""Up to here a copy through the socket is cheaper than an offer, a read and an answer."""
_STAGING_BYTES = 64 * 1024
_READ_MOST_BYTES = 2 * 1024 * 1024
"""Read no more at once, so that the sender may go on with what has been read."""

_ANSWER_EVERY_BYTES = 1024 * 1024
"""Answer once for so many bytes, not for every read: answers cost a system call at both ends."""

_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<Q{_TOKEN_BYTES}s")
_YES, _NO = b"\x01", b"\x00"


class MemoryTrial:
    """Finds out, for one fresh Unix socket, whether each end may read the other's memory.

    Three steps that all links take together, so that none waits for another: :meth:`hello`,
    :meth:`try_to_read`, :meth:`outcome`. The socket must be blocking, with a timeout.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._token = bytearray(os.urandom(_TOKEN_BYTES))
        self._memory: Optional[PeerMemory] = None
        self._readable = False

    def hello(self) -> None:
        """Tell the other end where a random token lies in this process."""
        self._sock.sendall(_HELLO.pack(address_of(memoryview(self._token)), bytes(self._token)))

    def try_to_read(self) -> None:
        """Try to read the other end's token from its memory, and tell it how that went."""
        address, token = _HELLO.unpack(_receive(self._sock, _HELLO.size))
        if available() and hasattr(socket, "SO_PEERCRED"):
            credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            (pid, _, _) = struct.unpack("iII", credentials)
            self._memory = PeerMemory(pid)
            seen = bytearray(_TOKEN_BYTES)
            try:
                self._memory.read(address, memoryview(seen))
            except OSError:
                pass  # Not permitted, or another pid namespace: then not. The token tells.
            self._readable = bytes(seen) == token
        self._sock.sendall(_YES if self._readable else _NO)

    def outcome(self) -> Optional[PeerMemory]:
        """The other end's memory, if both ends may read each other's; otherwise None."""
        agreed = _receive(self._sock, 1) == _YES and self._readable
        return self._memory if agreed else None


def _receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return data


class LocalLink(SocketLink):
    """A link to a rank of the same host whose memory may be read, and which may read ours.

    Views given to :meth:`send` and not taken must be given again, from the first byte that was not
    taken on; offered bytes are taken when the peer has read them.
    """

    __slots__ = (
        "_arrived",
        "_in_head",
        "_in_left",
        "_memory",
        "_offered",
        "_queue",
        "_read",
        "_staging",
        "_unsent",
    )

    def __init__(self, peer: int, sock: socket.socket, memory: PeerMemory) -> None:
        super().__init__(peer, sock)
        self._memory = memory
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._queue: Deque[Tuple[int, bytes, int]] = deque()  # address or 0, bytes, length
        self._in_head = b""  # a frame head of which a part has arrived
        self._in_left = 0  # bytes of an INLINE frame that have not arrived
        self._offered = 0  # bytes offered to the peer and not read by it
        self._arrived = 0  # of these, bytes that it has read and we have not reported
        self._read = 0  # bytes that we have read of what the peer offered, and not told it
        self._unsent = b""  # frames that did not fit into the socket

    # ---- sending -----------------------------------------------------------------------------

    def send(self, views: Views) -> int:
        if self._offered:
            # Even while our own frames are stuck: the peer's may be what they are waiting for.
            if not self._arrived:
                self._pump()
            if self._arrived:
                taken, self._arrived = self._arrived, 0
                self._offered -= taken
                return taken
        if self._unsent and not self._flush():
            return 0
        return self._post(views)

    def _post(self, views: Views) -> int:
        """Send what is small and offer what is large, beyond what is offered already."""
        skip = self._offered
        frames: List[bytes] = []
        taken = 0
        for view in views:
            flat = view.cast("B") if view.format != "B" or view.ndim != 1 else view
            if skip >= flat.nbytes:
                skip -= flat.nbytes
                continue
            if skip:
                flat, skip = flat[skip:], 0
            if flat.nbytes <= INLINE_MOST_BYTES and not self._offered:
                frames.append(_FRAME.pack(_INLINE << _KIND_SHIFT | flat.nbytes, 0))
                frames.append(flat)  # type: ignore[arg-type]
                taken += flat.nbytes
            elif flat.nbytes:
                frames.append(_FRAME.pack(_OFFER << _KIND_SHIFT | flat.nbytes, address_of(flat)))
                self._offered += flat.nbytes
        if frames:
            self._write(frames)
        return taken

    def _write(self, frames: List[bytes]) -> None:
        """Send the frames; what does not fit is kept, copied, for the next time."""
        if self._unsent:
            self._unsent += b"".join(bytes(frame) for frame in frames)
            self._flush()
            return
        sent = super().send(frames)  # type: ignore[arg-type]
        total = sum(len(frame) for frame in frames)
        if sent < total:
            self._unsent = b"".join(bytes(frame) for frame in frames)[sent:]

    def _flush(self) -> bool:
        sent = super().send([memoryview(self._unsent)])
        self._unsent = self._unsent[sent:]
        return not self._unsent

    # ---- receiving ---------------------------------------------------------------------------

    def recv(self, views: Views) -> int:
        if self._unsent:
            self._flush()
        if not self._queue:
            self._pump()
        got = 0
        for view in views:
            filled = 0
            while filled < view.nbytes:
                piece = self._next_piece(view[filled:] if filled else view)
                if not piece:
                    return got
                filled += piece
                got += piece
        return got

    def _next_piece(self, view: memoryview) -> int:
        """Fill the front of the view from the first thing that is queued; how many bytes."""
        if not self._queue:
            return 0
        address, data, length = self._queue[0]
        count = min(length, view.nbytes)
        if address:
            count = min(count, _READ_MOST_BYTES)
            try:
                count = self._memory.read(address, view[:count])
            except OSError as problem:
                raise LinkClosed(self.peer, f"its memory cannot be read: {closed_reason(problem)}") from None
            address += count
            self._read += count
        else:
            view[:count] = data[:count]
            data = data[count:]
        if count == length:
            self._queue.popleft()
        else:
            self._queue[0] = (address, data, length - count)
        if self._read >= _ANSWER_EVERY_BYTES or not self._queue:
            self._answer()
        return count

    def _answer(self) -> None:
        """Tell the peer how much of what it offered has been read."""
        if self._read:
            self._write([_FRAME.pack(_TAKEN << _KIND_SHIFT | self._read, 0)])
            self._read = 0

    def _pump(self) -> None:
        """Read what is in the socket and sort it: data to the queue, answers to the counter."""
        got = 0
        try:
            got = super().recv([self._staging])
        except LinkClosed:
            if not self._queue:
                raise
        position = 0
        while position < got:
            if self._in_left:
                count = min(self._in_left, got - position)
                self._queue.append((0, bytes(self._staging[position : position + count]), count))
                self._in_left -= count
                position += count
                continue
            need = HEAD_BYTES - len(self._in_head)
            piece = self._staging[position : position + need]
            position += len(piece)
            head = self._in_head + bytes(piece)
            if len(head) < HEAD_BYTES:
                self._in_head = head
                return
            self._in_head = b""
            word, address = _FRAME.unpack(head)
            kind, length = word >> _KIND_SHIFT, word & _LENGTH_MASK
            if kind == _INLINE:
                self._in_left = length
            elif kind == _OFFER:
                self._queue.append((address, b"", length))
            elif kind == _TAKEN:
                self._arrived += length
            else:
                raise LinkClosed(self.peer, f"it sent a frame of unknown kind {kind}")

    # ---- waiting -----------------------------------------------------------------------------

    def settled(self) -> bool:
        self._answer()
        return not self._unsent or self._flush()

    def poll_events(self, reading: bool, writing: bool) -> int:
        # Before anybody sleeps, the peer must know what it may overwrite.
        self._answer()
        waits_for_answer = writing and self._offered > 0
        blocked = bool(self._unsent) or (writing and not waits_for_answer)
        return (select.POLLIN if reading or waits_for_answer else 0) | (select.POLLOUT if blocked else 0)


_TRIAL_S = 10.0


def make_links(
    sockets: Mapping[int, socket.socket], transport: str = "auto", congestion: str = "auto"
) -> Dict[int, SocketLink]:
    """Links over proven sockets, by peer: those over Unix sockets read memory where both ends may.

    All ranks of a host must call this at the same time.

    Args:
        transport: ``auto``, ``memory`` (fail if memory cannot be read), ``unix`` or ``tcp``.
        congestion: see :func:`~ringcomm.transport.tcp.choose_congestion`.

    Raises:
        OSError: a connection broke.
        StartupError: ``memory`` was asked for, and the system does not permit it.
    """
    trials: Dict[int, MemoryTrial] = {}
    for peer, sock in sockets.items():
        if sock.family != socket.AF_UNIX:
            choose_congestion(sock, congestion)
        elif transport in ("auto", "memory"):
            sock.settimeout(_TRIAL_S)
            trials[peer] = MemoryTrial(sock)
    for trial in trials.values():
        trial.hello()
    for trial in trials.values():
        trial.try_to_read()
    links: Dict[int, SocketLink] = {}
    for peer, sock in sockets.items():
        memory = trials[peer].outcome() if peer in trials else None
        if memory is None and peer in trials and transport == "memory":
            raise StartupError(
                f"transport 'memory' was asked for, but this process and rank {peer} may not read each "
                "other's memory (a container, another user, or a security module forbids it); use 'auto' "
                "or 'unix'"
            )
        links[peer] = SocketLink(peer, sock) if memory is None else LocalLink(peer, sock, memory)
    return links
