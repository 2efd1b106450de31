"""Links within a host: small messages through a Unix socket, large ones through memory.

What travels on the socket are frames: a head of 16 bytes, a word whose highest byte is the kind and
whose other seven are a length, and a place; behind some of them come bytes::

    INLINE  length             the bytes follow
    OFFER   length, place      so many bytes lie there: come and read them
    TAKEN   length             so many of the offered bytes have been read and may be overwritten

What a place is, and how bytes are read there, is the affair of the two kinds of links:
:class:`~ringcomm.transport.vm.ReadingLink` and :class:`~ringcomm.transport.shm.SharedLink`.
"""

from __future__ import annotations

import select
import socket
import struct
from abc import abstractmethod
from collections import deque
from typing import Deque, List, Optional, Sequence, Tuple

from .base import LinkClosed
from .tcp import SocketLink

_FRAME = struct.Struct("<QQ")
HEAD_BYTES = _FRAME.size
_INLINE, _OFFER, _TAKEN = 1, 2, 3
_KIND_SHIFT = 56
_LENGTH_MASK = (1 << _KIND_SHIFT) - 1
_STAGING_BYTES = 64 * 1024
SHORT_BYTES = 2 * 1024
"""Up to here it is quicker to copy bytes behind their head than to send two pieces."""


def inline_head(length: int) -> bytes:
    """The head in front of so many bytes that follow."""
    return _FRAME.pack(_INLINE << _KIND_SHIFT | length, 0)


def offer(length: int, place: int) -> bytes:
    """The frame that offers so many bytes at a place."""
    return _FRAME.pack(_OFFER << _KIND_SHIFT | length, place)


class FramedLink(SocketLink):
    """What links within a host have in common: everything but the way to the large pieces.

    Attributes:
        answer_every_bytes: answers cost a system call at both ends, so one answers for so many bytes.
    """

    __slots__ = (
        "_arrived",
        "_head",
        "_inline_left",
        "_queue",
        "_read",
        "_staging",
        "_staging_views",
        "_unsent",
    )

    answer_every_bytes = 1

    def __init__(self, peer: int, sock: socket.socket) -> None:
        super().__init__(peer, sock)
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._staging_views = [self._staging]
        # Place, or the bytes themselves, and length of what has come and was not handed out.
        self._queue: Deque[Tuple[int, Optional[memoryview], int]] = deque()
        self._head = b""  # a frame head of which a part has arrived
        self._inline_left = 0  # bytes of an INLINE frame that have not arrived
        self._arrived = 0  # bytes that the peer has read of what was offered, since last asked
        self._read = 0  # bytes that we have read of what the peer offered, and not told it
        self._unsent = b""  # frames that did not fit into the socket

    @abstractmethod
    def _fetch(self, place: int, view: memoryview) -> int:
        """Copy bytes that the peer offered at this place into the view; how many, at least one."""

    # ---- sending -----------------------------------------------------------------------------

    def _send_short(self, view: memoryview) -> int:
        """Send a few bytes in a frame of their own; all of them are taken."""
        length = view.nbytes
        frame = _FRAME.pack(_INLINE << _KIND_SHIFT | length, 0) + view
        if self._unsent:
            self._unsent += frame
            self._flush()
            return length
        sent = SocketLink.send(self, (frame,))  # type: ignore[arg-type]
        if sent < len(frame):
            self._unsent = frame[sent:]
        return length

    def _write(self, frames: List[memoryview]) -> None:
        """Send the frames; what does not fit is kept, copied, for the next time."""
        if self._unsent:
            self._unsent += b"".join(frames)
            self._flush()
            return
        sent = SocketLink.send(self, frames)
        if sent < sum(map(len, frames)):
            self._unsent = b"".join(frames)[sent:]

    def _flush(self) -> bool:
        """Send what was kept; whether nothing is left of it."""
        if self._unsent:
            sent = SocketLink.send(self, [memoryview(self._unsent)])
            self._unsent = self._unsent[sent:]
        return not self._unsent

    # ---- receiving ---------------------------------------------------------------------------

    def recv(self, views: Sequence[memoryview]) -> int:
        if self._unsent:
            self._flush()
        if not self._queue:
            got = self._pump(views[0] if len(views) == 1 else None)
            if got or not self._queue:
                return got
        got = 0
        for view in views:
            filled, length = 0, view.nbytes
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
        place, data, length = self._queue[0]
        count = min(length, view.nbytes)
        if data is None:
            count = self._fetch(place, view[:count])
            self._read += count
        elif count == length:
            view[:count] = data
        else:
            view[:count] = data[:count]
            data = data[count:]
        if count == length:
            self._queue.popleft()
        else:
            self._queue[0] = (place + count, data, length - count)
        if self._read >= self.answer_every_bytes:
            self._answer()
        return count

    def _answer(self) -> None:
        """Tell the peer how much of what it offered has been read."""
        if self._read:
            read, self._read = self._read, 0
            try:
                self._write([memoryview(_FRAME.pack(_TAKEN << _KIND_SHIFT | read, 0))])
            except LinkClosed:
                pass  # Whoever is gone needs no answer; what it left behind can still be read.

    def _pump(self, view: Optional[memoryview] = None) -> int:
        """Read what is in the socket and sort it: data to the queue, answers to the counter.

        Returns:
            0, or if all that came was one short message: how much of it is now in the view.
        """
        try:
            got = SocketLink.recv(self, self._staging_views)
        except LinkClosed:
            if not self._queue:
                raise
            return 0
        staging, position = self._staging, 0
        if view is not None and not self._head and not self._inline_left:
            length = got - HEAD_BYTES
            word = _INLINE << _KIND_SHIFT | length
            if 0 < length <= view.nbytes and _FRAME.unpack_from(staging)[0] == word:
                view[:length] = staging[HEAD_BYTES:got]
                return length
        while position < got:
            if self._inline_left:
                count = min(self._inline_left, got - position)
                self._queue.append((0, memoryview(bytes(staging[position : position + count])), count))
                self._inline_left -= count
                position += count
            elif not self._head and got - position >= HEAD_BYTES:
                self._sort(*_FRAME.unpack_from(staging, position))
                position += HEAD_BYTES
            else:
                piece = bytes(staging[position : min(got, position + HEAD_BYTES - len(self._head))])
                self._head += piece
                position += len(piece)
                if len(self._head) == HEAD_BYTES:
                    word, place = _FRAME.unpack(self._head)
                    self._head = b""
                    self._sort(word, place)
        return 0

    def _sort(self, word: int, place: int) -> None:
        kind, length = word >> _KIND_SHIFT, word & _LENGTH_MASK
        if kind == _INLINE:
            self._inline_left = length
        elif kind == _OFFER:
            self._queue.append((place, None, length))
        elif kind == _TAKEN:
            self._arrived += length
        else:
            raise LinkClosed(self.peer, f"it sent a frame of unknown kind {kind}")

    # ---- waiting -----------------------------------------------------------------------------

    @abstractmethod
    def _waits_for_answer(self) -> bool:
        """Whether sending cannot go on before the peer has read something."""

    def settled(self) -> bool:
        self._answer()
        return self._flush()

    def poll_events(self, reading: bool, writing: bool) -> int:
        # Before anybody sleeps, the peer must know what it may overwrite.
        self._answer()
        asleep = writing and self._waits_for_answer()
        # What is queued here is nothing that the system could wake us for: then do not sleep.
        awake = (reading and self._queue) or self._unsent or (writing and not asleep)
        return (select.POLLIN if reading or asleep else 0) | (select.POLLOUT if awake else 0)

    def close(self) -> None:
        try:
            self._flush()
        except LinkClosed:
            pass  # Nobody is left to read it.
        self._queue.clear()
        super().close()


def flat(view: memoryview) -> memoryview:
    """The view as plain bytes."""
    return view.cast("B") if view.format != "B" or view.ndim != 1 else view
