"""Links within a host: small messages through a Unix socket, large ones through memory.

What travels on the socket are frames: a head of 16 bytes, a word whose highest byte is the kind and
whose other seven are a length, and a place; behind some of them come bytes::

    INLINE    length             the bytes follow
    OFFER     length, place      so many bytes lie there in the sender's ring: copy them out
    TAKEN     length             so many bytes of the ring have been copied and may be overwritten
    LEND      length, place      so many bytes lie there in the sender's own memory: come and read them
    RETURNED  length             so many of the lent bytes have been read and may be overwritten

The two kinds of links copy the bytes of large messages:
:class:`~ringcomm.transport.shm.SharedLink` has rings of shared memory, and
:class:`~ringcomm.transport.process_memory.ReadingLink` may also read the memory of the process at
the other end.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
from abc import abstractmethod
from collections import deque
from typing import Deque, List, NamedTuple, Optional, Tuple

from .base import LinkClosed, Views
from .tcp import SocketLink
from .views import clipped, gathered

_FRAME = struct.Struct("<QQ")
HEAD_BYTES = _FRAME.size
INLINE, OFFER, TAKEN, LEND, RETURNED = 1, 2, 3, 4, 5
_KIND_SHIFT = 56
_LENGTH_MASK = (1 << _KIND_SHIFT) - 1
_STAGING_BYTES = 64 * 1024
SHORT_BYTES = 2 * 1024
"""Up to here it is quicker to copy bytes behind their head than to send two pieces."""
ANSWER_EVERY_BYTES = {OFFER: 256 * 1024, LEND: 1024 * 1024}
"""Answers cost a system call at both ends, so one answers for so many bytes."""
_ANSWERS = {OFFER: TAKEN, LEND: RETURNED}


class Carriers(NamedTuple):
    """Up to which size a link uses which carrier.

    Attributes:
        inline_most_bytes: up to here through the socket: two copies by the system, and no answer.
        ring_most_bytes: up to here through shared memory, if there is any: two copies in the cache. What
            is larger is lent, if the peer may read it: one copy, but the system looks every page up.
    """

    inline_most_bytes: int = 128 * 1024 + 64
    ring_most_bytes: int = 1024 * 1024

    def describe(self) -> str:
        """The limits as one line of text."""
        small, large = self.inline_most_bytes // 1024, self.ring_most_bytes // 1024
        return f"up to {small} KiB through the socket, up to {large} KiB through shared memory"


ONLY_SOCKET = Carriers(sys.maxsize, sys.maxsize)
ONLY_RING = Carriers(0, sys.maxsize)
ONLY_LENT = Carriers(0, 0)


def head(kind: int, length: int, place: int = 0) -> memoryview:
    """The head of a frame."""
    return memoryview(_FRAME.pack(kind << _KIND_SHIFT | length, place))


def inlined(views: List[memoryview]) -> List[memoryview]:
    """The views in one frame, which the receiver gets with one call."""
    return [head(INLINE, sum(view.nbytes for view in views)), *views] if views else []


class FramedLink(SocketLink):
    """What links within a host have in common: everything but the way to the large pieces."""

    room_bytes = HEAD_BYTES

    __slots__ = (
        "_answers",
        "_head",
        "_inline_left",
        "_inline_most",
        "_lent",
        "_owed",
        "_queue",
        "_read",
        "_staging",
        "_staging_views",
        "_top",
        "_unsent",
        "carriers",
    )

    def __init__(self, peer: int, sock: socket.socket) -> None:
        super().__init__(peer, sock)
        self.use(Carriers())
        self._lent = 0  # bytes lent to the peer and not read by it
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._staging_views = [self._staging]
        self._top = memoryview(bytearray(HEAD_BYTES))  # a head that is read together with what follows
        # Kind, place, length and, if INLINE, the bytes of what has come and was not handed out.
        self._queue: Deque[Tuple[int, int, int, Optional[memoryview]]] = deque()
        self._head = b""  # a frame head of which a part has arrived
        self._owed = 0  # bytes of an INLINE frame that has begun: nothing else may be sent before them
        self._inline_left = 0  # bytes of an INLINE frame that have not arrived
        # Bytes that the peer has read of what was offered or lent, since last asked.
        self._answers = {OFFER: 0, LEND: 0}
        # Bytes that this end has read of what the peer offered or lent, and not acknowledged.
        self._read = {OFFER: 0, LEND: 0}
        self._unsent = b""  # frames that did not fit into the socket

    def use(self, carriers: Carriers) -> None:
        """Send over these carriers from now on."""
        self.carriers = carriers
        self._inline_most = carriers.inline_most_bytes

    def ways(self) -> List[Carriers]:
        """The carriers that this link has, each for all sizes; first the one for small messages."""
        return [ONLY_SOCKET]

    @abstractmethod
    def _fetch(self, kind: int, place: int, view: memoryview) -> int:
        """Copy bytes that the peer offered or lent into the view; how many, or 0 if it has revoked them."""

    # ---- sending -----------------------------------------------------------------------------

    def send_packet(self, packet: memoryview) -> int:
        length = packet.nbytes - HEAD_BYTES
        if self._unsent or self._owed or self._lent or not 0 < length <= self._inline_most:
            return self.send((packet[HEAD_BYTES:],))
        _FRAME.pack_into(packet, 0, INLINE << _KIND_SHIFT | length, 0)
        sent = SocketLink.send(self, (packet,))
        if sent < packet.nbytes:
            self._unsent = bytes(packet[sent:])
        return length

    def _send_inline(self, views: Views, length: int) -> int:
        """Send views in one frame; how many bytes were taken. Nothing may be unsent."""
        frame = _FRAME.pack(INLINE << _KIND_SHIFT | length, 0)
        if length <= SHORT_BYTES:
            frame += b"".join(views)
            sent, whole = SocketLink.send(self, (frame,)), len(frame)  # type: ignore[arg-type]
            if sent < whole:
                self._unsent = frame[sent:]
            return length
        sent = SocketLink.send(self, (frame, *views))  # type: ignore[arg-type]
        if sent >= HEAD_BYTES:
            self._owed = HEAD_BYTES + length - sent
            return sent - HEAD_BYTES
        if sent:
            self._unsent = b"".join((frame, *views))[sent:]
            return length
        return 0

    def _send_owed(self, views: Views) -> int:
        """Go on with the frame that has begun; how many bytes were taken."""
        sent = SocketLink.send(self, clipped(views, self._owed))
        self._owed -= sent
        return sent

    def _write(self, frames: List[memoryview]) -> None:
        """Send the frames; what does not fit is kept, copied, for the next time."""
        if self._unsent or self._owed:
            self._unsent += b"".join(frames)
            self._flush()
            return
        sent = SocketLink.send(self, frames)
        if sent < sum(map(len, frames)):
            self._unsent = b"".join(frames)[sent:]

    def _flush(self) -> bool:
        """Send what was kept; whether nothing is left of it."""
        if self._unsent and not self._owed:
            sent = SocketLink.send(self, [memoryview(self._unsent)])
            self._unsent = self._unsent[sent:]
        return not self._unsent

    # ---- receiving ---------------------------------------------------------------------------

    def recv_packet(self, packet: memoryview) -> int:
        if self._queue or self._inline_left or self._head:
            return self.recv((packet[HEAD_BYTES:],))
        if self._unsent:
            self._flush()
        got = SocketLink.recv(self, (packet,))
        if not got:
            return 0
        length = got - HEAD_BYTES
        if got == packet.nbytes and _FRAME.unpack_from(packet)[0] == INLINE << _KIND_SHIFT | length:
            return length
        self._parse(memoryview(bytes(packet[:got])))
        return self.recv((packet[HEAD_BYTES:],)) if self._queue else 0

    def recv(self, views: Views) -> int:
        if self._unsent:
            self._flush()
        got = 0
        if not self._queue:
            got = self._receive(views)
            if not self._queue:
                return got
        skip = got
        for view in views:
            filled, length = min(skip, view.nbytes), view.nbytes
            skip -= filled
            while filled < length:
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
        kind, place, length, data = self._queue[0]
        count = min(length, view.nbytes)
        if data is None:
            count = self._fetch(kind, place, view[:count])
            if not count:
                # The peer has aborted the call. It sends nothing more but the reason, or closes the link.
                self._queue.clear()
                return 0
            self._read[kind] += count
        elif count == length:
            view[:count] = data
        else:
            view[:count] = data[:count]
            data = data[count:]
        if count == length:
            self._queue.popleft()
        else:
            self._queue[0] = (kind, place + count, length - count, data)
        # A lender waits until all that it lent has been acknowledged.
        if kind != INLINE and (
            self._read[kind] >= ANSWER_EVERY_BYTES[kind] or kind == LEND and not self._queue
        ):
            self._answer()
        return count

    def _answer(self) -> None:
        """Acknowledge to the peer how much of what it offered and lent has been read."""
        frames = [head(_ANSWERS[kind], count) for kind, count in self._read.items() if count]
        if frames:
            self._read = {OFFER: 0, LEND: 0}
            try:
                self._write(frames)
            except LinkClosed:
                pass  # The peer needs no answer any more; what it sent before can still be read.

    def _receive(self, views: Views) -> int:
        """Read what is in the socket, when nothing is queued: how many bytes are in the views now.

        If that is 0, something may be in the queue.
        """
        if self._inline_left:
            got = SocketLink.recv(self, clipped(views, self._inline_left))
            self._inline_left -= got
            return got
        if self._head or not views or len(views) == 1 and views[0].nbytes <= SHORT_BYTES:
            return self._pump(views[0] if len(views) == 1 else None)
        # Usually these are the bytes of one INLINE frame; then they are received into their final place. No
        # more is read: what follows them would have to be copied twice.
        top = self._top
        got = SocketLink.recv(self, (top, *views))
        if got < HEAD_BYTES:
            self._head = bytes(top[:got])
            return 0
        word, place = _FRAME.unpack(top)
        got -= HEAD_BYTES
        self._sort(word, place)
        taken = min(got, self._inline_left)
        self._inline_left -= taken
        if taken < got:
            self._parse(memoryview(gathered(views, taken, got)))
        return taken

    def _pump(self, view: Optional[memoryview] = None) -> int:
        """Read what is in the socket and sort it: data to the queue, answers to the counters.

        Returns:
            0, or if all that came was one short message: how much of it is now in the view.
        """
        try:
            got = SocketLink.recv(self, self._staging_views)
        except LinkClosed:
            if not self._queue:
                raise
            return 0
        staging = self._staging
        if view is not None and not self._head and not self._inline_left:
            length = got - HEAD_BYTES
            word = INLINE << _KIND_SHIFT | length
            if 0 < length <= view.nbytes and _FRAME.unpack_from(staging)[0] == word:
                view[:length] = staging[HEAD_BYTES:got]
                return length
        self._parse(staging[:got])
        return 0

    def _parse(self, data: memoryview) -> None:
        """Sort what has been read."""
        position, got = 0, data.nbytes
        while position < got:
            if self._inline_left:
                count = min(self._inline_left, got - position)
                self._queue.append((INLINE, 0, count, memoryview(bytes(data[position : position + count]))))
                self._inline_left -= count
                position += count
            elif not self._head and got - position >= HEAD_BYTES:
                self._sort(*_FRAME.unpack_from(data, position))
                position += HEAD_BYTES
            else:
                piece = bytes(data[position : min(got, position + HEAD_BYTES - len(self._head))])
                self._head += piece
                position += len(piece)
                if len(self._head) == HEAD_BYTES:
                    word, place = _FRAME.unpack(self._head)
                    self._head = b""
                    self._sort(word, place)

    def _sort(self, word: int, place: int) -> None:
        kind, length = word >> _KIND_SHIFT, word & _LENGTH_MASK
        if kind == INLINE:
            self._inline_left = length
        elif kind in (OFFER, LEND):
            self._queue.append((kind, place, length, None))
        elif kind == TAKEN:
            self._answers[OFFER] += length
        elif kind == RETURNED:
            self._answers[LEND] += length
        else:
            raise LinkClosed(self.peer, f"it sent a frame of unknown kind {kind}")

    # ---- waiting -----------------------------------------------------------------------------

    @abstractmethod
    def _waits_for_answer(self) -> bool:
        """Whether sending cannot go on before the peer has read something."""

    def settled(self) -> bool:
        self._answer_lender()
        return self._flush()

    def _answer_lender(self) -> None:
        """Acknowledge what a lender may overwrite, before this end waits.

        What was read of a ring need not be acknowledged before it is much: until then the peer has room left.
        """
        if self._read[LEND]:
            self._answer()

    def poll_events(self, reading: bool, writing: bool) -> int:
        self._answer_lender()
        asleep = writing and not self._owed and self._waits_for_answer()
        # The system does not report what is queued here: then do not sleep.
        awake = (reading and self._queue) or self._unsent or (writing and not asleep)
        return (select.POLLIN if reading or asleep else 0) | (select.POLLOUT if awake else 0)

    def close(self) -> None:
        try:
            self._flush()
        except LinkClosed:
            pass  # The peer has closed the link and reads no more.
        self._queue.clear()
        super().close()
