"""Links through memory that two processes share.

The sender copies bytes into its :class:`~ringcomm.transport.ring.Ring` and stores their number; the receiver
sees that, copies them out, and stores how many it has read. None of this is a system call. An end without
work for a while sleeps on the Unix socket between the two. Before that it stores that it sleeps, and looks
once more; the other end checks for that after each of its stores, and wakes it by a byte through the socket.

**Memory barriers.** An end that sees a new position must also see the bytes before it, and an end that
goes to sleep must not miss a position that is stored at the same time. Processors reorder loads and stores,
ARM more than x86. Between the two stands a lock that is released and then taken: everything before the
release is ordered before everything after the acquisition.
"""

from __future__ import annotations

import select
import socket
import threading
from time import perf_counter
from typing import List, Optional

from .base import LinkClosed, Views
from .ring import (
    CLOSED,
    CONTROL_BYTES,
    LENT,
    MASK,
    NEAR_BYTES,
    READ,
    READER_STATE,
    SPAN,
    WRITER_STATE,
    WRITTEN,
    Ring,
)
from .span import TIMED_BYTES, TIMED_PACKETS, SpanChoice, own_s_per_byte
from .tcp import SocketLink
from .views import flat

PIECE_BYTES = 512 * 1024
"""Copy at most this before the other end learns of it, so that both ends copy at the same time."""
_HARDLY_MORE = 1024
"""A piece may be this much longer: a header in front of a piece does not make two of it."""
_NOTHING = memoryview(b"")
ENDED = "it closed the connection"


class SharedLink(SocketLink):
    """A link to a rank of the same host through two rings of shared memory, which it owns. Bytes are taken as
    soon as they are in the ring.
    """

    __slots__ = (
        "_acquire", "_announced_read", "_choice", "_in", "_in_size", "_in_span", "_in_words",
        "_loans_read", "_most", "_open", "_out", "_out_size", "_out_span", "_out_words",
        "_packets", "_read", "_reader_seen", "_ready", "_release", "_rings", "_room", "_sleeps",
        "_writer_seen", "_written",
    )  # fmt: skip

    carrier = "shared memory"
    peeks = True

    def __init__(self, peer: int, sock: socket.socket, outward: Ring, inward: Ring) -> None:
        super().__init__(peer, sock)
        self._rings: List[Ring] = [outward, inward]
        self._out, self._out_words, self._out_size = outward.bytes, outward.words, outward.size
        self._in, self._in_words, self._in_size = inward.bytes, inward.words, inward.size
        self._out_span = self._out_words[SPAN] = min(outward.size, NEAR_BYTES)
        self._in_span = min(inward.size, NEAR_BYTES)
        # Only a ring that has more than the usual span leaves a choice.
        self._choice = SpanChoice(own_s_per_byte()) if outward.size > NEAR_BYTES else None
        self._packets = 0  # since one was timed
        self._most = MASK  # more bytes at once do not go through the ring
        self._open = True  # until this end closes, or finds that the other one has
        self._written = 0  # bytes in all that this end has written
        self._room = self._out_span  # at least this many bytes more fit
        self._read = 0  # bytes in all that this end has read
        self._announced_read = 0  # the same, as the other end has seen it
        self._ready = 0  # at least this many bytes more have arrived
        self._loans_read = 0
        self._reader_seen = self._writer_seen = 0  # the other end's states, as they were last handled
        self._sleeps = 0
        self._make_fence()

    def _make_fence(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def _order(self) -> None:
        """Issue a memory barrier."""
        self._release()
        self._acquire()

    def _store(self, words: memoryview, index: int, value: int) -> None:
        """Store a word after everything that was loaded and stored before."""
        self._release()
        self._acquire()
        words[index] = value

    # ---- sending -----------------------------------------------------------------------------

    def send(self, views: Views) -> int:
        length = 0
        for view in views:
            length += view.nbytes
        if length > self._most:
            return self._send_large(views)
        return self._send_through_ring(views, length)

    def send_packet(self, packet: memoryview) -> int:
        length = packet.nbytes
        place = self._written % self._out_span
        if length > self._room or length > self._most or place + length > self._out_span:
            return self.send((packet,))
        if length >= TIMED_BYTES and self._choice is not None:
            self._packets = (self._packets + 1) % TIMED_PACKETS
            if not self._packets:
                return self._send_through_ring((packet,), length, TIMED_PACKETS)
        self._out[place : place + length] = packet
        self._announce_written(length)
        return length

    def _send_large(self, views: Views) -> int:
        """Send views that are not for the ring, or not now; return how many bytes were taken."""
        raise NotImplementedError  # of links that lend: through others everything goes through the ring

    def _send_through_ring(self, views: Views, length: int, copies: int = 1) -> int:
        """Copy as much of the views as fits, up to a piece; return how many bytes. ``copies``: how many
        copies of this length, the others not timed, it stands for.
        """
        if length > PIECE_BYTES + _HARDLY_MORE:
            length = PIECE_BYTES
        choice = self._choice
        if choice is not None and choice.whole is not (self._out_span > NEAR_BYTES):
            self._change_span(choice.whole)
        if length > self._room and length:
            length = min(length, self._look_for_room())
        if not length:
            return 0
        began_s = perf_counter()
        left, written = length, self._written
        ring, size = self._out, self._out_span
        for view in views:
            data = flat(view)
            count = data.nbytes
            if count > left:
                count = left
                data = data[:count]
            place = written % size
            if place + count <= size:
                ring[place : place + count] = data
            else:
                ring[place:size] = data[: size - place]
                ring[: place + count - size] = data[size - place :]
            written += count
            left -= count
            if not left:
                break
        if choice is not None and length >= TIMED_BYTES:
            choice.note(length, perf_counter() - began_s, copies)
        self._announce_written(length)
        return length

    def _change_span(self, whole: bool) -> None:
        """Use the whole ring from now on, or a part, if all written bytes have been read."""
        if self._look_for_room() == self._out_span:
            # The other end looks at this word when it finds bytes that it has not read; there are none now.
            self._out_span = self._room = self._out_size if whole else NEAR_BYTES
            self._out_words[SPAN] = self._out_span

    def _look_for_room(self) -> int:
        """Return how many bytes fit into the ring."""
        unread = (self._written - self._out_words[READ]) & MASK
        if unread > self._out_span:
            raise LinkClosed(self.peer, "it claims to have read more than it was sent")
        if not self._open or self._out_words[READER_STATE] == CLOSED:
            raise LinkClosed(self.peer, ENDED)
        self._room = self._out_span - unread
        return self._room

    def _announce_written(self, count: int) -> None:
        """Announce this many more bytes in the ring."""
        self._room -= count
        written = self._written = (self._written + count) & MASK
        words = self._out_words
        self._release()
        self._acquire()
        words[WRITTEN] = written
        self._release()
        self._acquire()
        state = words[READER_STATE]
        if state != self._reader_seen:
            self._meet_reader(state)

    def _wake_reader(self) -> None:
        """Wake the other end if it waits for the word just stored."""
        self._order()
        state = self._out_words[READER_STATE]
        if state != self._reader_seen:
            self._meet_reader(state)

    def _meet_reader(self, state: int) -> None:
        """Wake the other end if it sleeps. If it has closed the link it may have read what this end just
        stored, its last message; so this is not an error yet, and the next send or receive raises it.
        """
        self._reader_seen = state
        if state == CLOSED:
            self._end()
        elif state:
            self._kick()

    def _kick(self) -> None:
        """Wake the other end."""
        try:
            self._send(b"!")
        except (BlockingIOError, InterruptedError):
            pass  # There are bytes in the socket that it has not read: they wake it.
        except OSError:
            self._end()

    def _end(self) -> None:
        """Note that the other end reads no more."""
        self._open = False
        self._room = 0

    # ---- receiving ---------------------------------------------------------------------------

    def recv(self, views: Views) -> int:
        ready = self._ready or self._look()
        if not ready:
            return self._recv_otherwise(views)
        read, left = self._read, ready
        ring, size = self._in, self._in_span
        for view in views:
            data = flat(view)
            count = data.nbytes
            if count > left:
                count = left
                data = data[:count]
            place = read % size
            if place + count <= size:
                data[:] = ring[place : place + count]
            else:
                data[: size - place] = ring[place:size]
                data[size - place :] = ring[: place + count - size]
            read += count
            left -= count
            if not left:
                break
        self._ready = ready
        SharedLink.skip(self, ready - left)
        return ready - left

    def recv_packet(self, packet: memoryview) -> int:
        length = packet.nbytes
        ready = self._ready or self._look()
        if not ready:
            return self._recv_otherwise((packet,))
        place = self._read % self._in_span
        if length > ready or place + length > self._in_span:
            return self.recv((packet,))
        packet[:] = self._in[place : place + length]
        self._ready = ready - length
        self._read = (self._read + length) & MASK
        if (self._read - self._announced_read) & MASK >= self._in_span // 4:
            self._announce_read()
        return length

    def peek(self, most_bytes: int, item_bytes: int) -> Optional[memoryview]:
        ready = self._ready
        if ready < item_bytes:  # perhaps a part of an item, whose rest has arrived since, or was lent
            ready = self._look()
            if ready < item_bytes:
                return None if self._has_otherwise() else _NOTHING
        place = self._read % self._in_span
        count = min(ready, most_bytes, self._in_span - place)
        if count < item_bytes <= ready:
            return None  # The next item begins at the end of the ring, and continues at its start.
        return self._in[place : place + count - count % item_bytes]

    def skip(self, count: int) -> bool:
        self._ready -= count
        self._read = (self._read + count) & MASK
        if (self._read - self._announced_read) & MASK >= self._in_span // 4:
            self._announce_read()
        return True

    def _look(self) -> int:
        """Return how many bytes are in the other end's ring."""
        ready = (self._in_words[WRITTEN] - self._read) & MASK
        if ready:
            self._release()
            self._acquire()
            span = self._in_words[SPAN]
            if span != self._in_span:
                if span > self._in_size or span not in (NEAR_BYTES, self._in_size):
                    raise LinkClosed(self.peer, "it claims to use more of the memory than there is")
                self._in_span = span
            if ready > span:
                raise LinkClosed(self.peer, "it claims to have sent more than there is room for")
            self._ready = ready
        elif (self._read - self._announced_read) & MASK >= TIMED_BYTES:
            self._announce_read()  # The other end may change the span only when it has seen all of it read.
        return ready

    def _recv_otherwise(self, views: Views) -> int:
        """Receive bytes that do not come through the ring, now that it is empty; return how many."""
        if not self._has_otherwise():
            return 0
        lent = self._in_words[LENT] != self._loans_read
        self._order()
        if self._look():
            return self.recv(views)
        if lent:
            return self._recv_lent(views)
        raise LinkClosed(self.peer, ENDED)

    def _has_otherwise(self) -> bool:
        """Return whether anything was lent, or the stream has ended."""
        words = self._in_words
        return bool(words[LENT] != self._loans_read or not self._open or words[WRITER_STATE] == CLOSED)

    def _recv_lent(self, views: Views) -> int:
        """Receive bytes that the other end has lent; return how many."""
        raise LinkClosed(self.peer, "it lent memory that this end cannot read")

    def _announce_read(self) -> None:
        """Let the other end overwrite the bytes that have been read."""
        self._announced_read = self._read
        self._store(self._in_words, READ, self._read)
        self._wake_writer()

    def _wake_writer(self) -> None:
        """Wake the other end if it waits for the word just stored."""
        self._order()
        state = self._in_words[WRITER_STATE]
        if state != self._writer_seen:
            self._writer_seen = state
            if state and state != CLOSED:
                self._kick()

    # ---- waiting -----------------------------------------------------------------------------

    def poll_events(self, reading: bool, writing: bool) -> int:
        if self._announced_read != self._read:
            self._announce_read()
        self._sleeps = self._sleeps % (MASK >> 1) + 1
        if reading:
            self._in_words[READER_STATE] = self._sleeps
        if writing:
            self._out_words[WRITER_STATE] = self._sleeps
        self._order()
        awake = (reading and self._may_receive()) or (writing and self._may_send())
        return select.POLLIN | (select.POLLOUT if awake else 0)

    def _may_receive(self) -> bool:
        return bool(self._ready or self._in_words[WRITTEN] != self._read or self._has_otherwise())

    def _may_send(self) -> bool:
        words = self._out_words
        return bool(
            not self._open
            or (self._written - words[READ]) & MASK != self._out_span
            or words[READER_STATE] == CLOSED
        )

    def woken(self, events: int) -> None:
        self._in_words[READER_STATE] = self._out_words[WRITER_STATE] = 0
        if events & ~select.POLLOUT:
            try:
                if not self.sock.recv(64):
                    self._end()
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self._end()

    def revoke(self) -> None:
        self._make_fence()  # the call may have been interrupted between its two halves

    def close(self) -> None:
        if self._rings:
            self._make_fence()
            self._order()
            self._in_words[READER_STATE] = self._out_words[WRITER_STATE] = CLOSED
            self._end()
            self._in_words = self._out_words = memoryview(bytearray(CONTROL_BYTES)).cast("P")
            self._read = self._written = self._ready = 0
        super().close()
        for ring in self._rings:
            ring.close()
        self._rings = []
