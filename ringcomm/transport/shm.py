"""Links through memory that two processes of a host share.

Each end makes a :class:`Ring` for its outgoing bytes: anonymous memory that it passes to the other end
through their Unix socket, and that the system frees when both end. The sender copies bytes into its ring and
stores their number; the receiver sees that, copies them out, and stores how many it has read. None of this is
a system call. An end without work for a while sleeps on the socket. Before that it stores that it sleeps, and
looks once more; the other end checks for that after each of its stores, and wakes it by a byte through the
socket.

**Lending.** Bytes in the sender's :mod:`arena <.arena>` are not copied: the sender announces their place, and
the receiver reads them from its own mapping. (:class:`~.local.ReadingLink` lends other memory too.)

**Revocation.** A lender that aborts a call (Ctrl-C, a time limit, an error) may overwrite its buffer at once,
while the peer still reads it. So it stores a word first, which the peer checks after it has read; bytes read
after a revocation are not counted.

**Memory barriers.** An end that sees a new position must also see the bytes before it, and an end that
goes to sleep must not miss a position that is stored at the same time. Processors reorder loads and stores,
ARM more than x86. Between the two stands a lock that is released and then taken: everything before the
release is ordered before everything after the acquisition.

**Span.** A sender uses a part of its ring, or all of it (:class:`SpanChoice`). Between cores that share a
cache a small part is best: it stays in the cache. Between cores that share none it is expensive to write
lines that the other core still has in its cache (225 us for 512 KiB instead of 55), which it evicts as it
reads more. A virtual machine's state changes within seconds, so the small part is tried again and again.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import sys
import threading
from functools import lru_cache
from time import perf_counter
from typing import List, Optional, Tuple

import numpy as np

from ..wire.frames import HEADER_BYTES
from .arena import MIN_BYTES, Arena, PeerArena, nameless
from .base import LinkClosed, Views, address_of, flat
from .reactor import error_text
from .tcp import SocketLink

RING_BYTES = 8 * 1024 * 1024  # more than a core's own cache holds
NEAR_BYTES = 1024 * 1024
"""The part used between cores that share a cache, and the whole ring where several ranks share a host."""
SMALL_RING_BYTES = 64 * 1024  # where many ranks share a host and each has a ring for every other one
SIZES = (RING_BYTES, RING_BYTES // 2, RING_BYTES // 4, NEAR_BYTES, SMALL_RING_BYTES)

CONTROL_BYTES = 512 * struct.calcsize("P")
"""Differs between processes of 32 and 64 bits, as their words do: neither takes the other's memory."""
_LINES = 16  # words between two of them: a processor moves whole cache lines, often two at once
WRITTEN, READ = 0 * _LINES, 1 * _LINES  # bytes in all, and how many of them may be overwritten
WRITER_STATE, READER_STATE = 2 * _LINES, 3 * _LINES
"""0 while that end is awake, another number each time it sleeps, and at last :data:`CLOSED`."""
LENT, LOANS_READ, RETURNED = 4 * _LINES, 5 * _LINES, 6 * _LINES
"""Pieces of its own memory that the writer has lent, and how many pieces and bytes of them have been read."""
SPAN = 7 * _LINES
"""How many of the ring's bytes are in use, a power of two: a byte lies at its position modulo this. The
writer changes it only while all written bytes have been read."""
LOANS = 8 * _LINES  # from here on two words for each lent piece, its address and its length, cyclically
MAX_LOANS = 16
REVOKED = 10 * _LINES  # not 0 if the writer has revoked the lent pieces: it may have overwritten them
MASK = 2 * sys.maxsize + 1
"""Words count up to here and then from 0 again. The outstanding bytes are always far fewer."""
CLOSED = MASK
IN_ARENA = MASK - MASK // 2
"""Added to the length of a piece in the lender's arena, whose offset there replaces the address."""


class Ring:
    """Shared memory with control words in front, and its descriptor; OSError if it is no ring."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        try:
            total = os.fstat(descriptor).st_size
            self.size = total - CONTROL_BYTES
            if self.size not in SIZES:
                raise OSError(f"it has {total} bytes")
            self._map = mmap.mmap(descriptor, total)
        except (OSError, ValueError) as problem:
            os.close(descriptor)
            raise OSError(f"cannot map shared memory: {problem}") from None
        # Every page is mapped now: later a page fault would cost more than the message that meets it.
        self._map[:: mmap.PAGESIZE]
        whole = memoryview(self._map)
        self.words = whole[:CONTROL_BYTES].cast("P")
        self.bytes = whole[CONTROL_BYTES:]

    @classmethod
    def make(cls, size: int = RING_BYTES) -> Ring:
        """Make a ring of new memory; raises OSError if the system has none (left)."""
        if not hasattr(os, "posix_fallocate"):
            raise OSError("this system does not reserve memory")
        descriptor = nameless()
        try:
            # All of it now: missing memory would be a SIGBUS later.
            os.posix_fallocate(descriptor, 0, CONTROL_BYTES + size)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def close_descriptor(self) -> None:
        """Close it once the other end has it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Release the memory. May be called again."""
        self.close_descriptor()
        self.words.release()
        try:
            self.bytes.release()
            self._map.close()
        except BufferError:
            pass  # An array still shows some of it, and the memory goes with the array.


# -- how much of a ring is used --------------------------------------------------------------------

TIMED_BYTES = 96 * 1024  # shorter copies are not timed: timing takes a microsecond
WINDOW = 4  # the shortest of this many copies decides: a process that lost its core in between does not
SKIPPED_BYTES = 1024 * 1024  # after a change the lines are in no cache yet, and cheap to write
STINT_BYTES = 512 * 1024 * 1024  # through the whole ring before its part is tried again, which costs 1 %
EXPENSIVE = 8.0
"""Factor by which a copy into the ring takes longer than one within this core's own cache. (3 to 5 between
cores of an AMD EPYC that share a cache, 12 to 18 between others.)"""


@lru_cache(maxsize=None)
def own_s_per_byte() -> float:
    """Return the seconds per byte of a copy within this core's cache; the first call measures for 200 us."""
    source, target = np.ones(128 * 1024, np.uint8), np.zeros(128 * 1024, np.uint8)
    times = []
    for _ in range(16):
        began_s = perf_counter()
        target[:] = source
        times.append(perf_counter() - began_s)
    return max(min(times), 1e-9) / source.nbytes


class SpanChoice:
    """Decides for one sender whether to use the whole ring."""

    __slots__ = ("_bytes", "_limit_s_per_byte", "_times", "whole")

    def __init__(self, own_s_per_byte: float) -> None:
        self._limit_s_per_byte = EXPENSIVE * own_s_per_byte
        self.whole = False
        self._bytes = 0  # copied since the last change
        self._times: List[float] = []  # per byte, of this window

    def note(self, count: int, elapsed_s: float) -> None:
        """Take a timed copy of ``count`` bytes into account, and change ``whole`` if due."""
        self._bytes += count
        if self.whole:
            if self._bytes >= STINT_BYTES:
                self.whole, self._bytes = False, 0
        elif self._bytes >= SKIPPED_BYTES:
            self._times.append(elapsed_s / count)
            if len(self._times) == WINDOW:
                if min(self._times) > self._limit_s_per_byte:
                    self.whole, self._bytes = True, 0
                self._times.clear()


# -- the link --------------------------------------------------------------------------------------

PIECE_BYTES = 512 * 1024  # (and a header) before the other end learns of it, so that both copy at once
_READ_MOST_BYTES = 2 * 1024 * 1024  # at once, so that the sender may continue with what was read
_NOTHING = memoryview(b"")
_ENDED = "it closed the connection"


class SharedLink(SocketLink):
    """A link to a rank of the same host through two rings of shared memory, which it owns.

    Bytes are taken as soon as they are in the ring. Lent bytes are taken when the other end has read them:
    views given to :meth:`send` and not taken must be given again, from the first byte that was not taken
    on. While anything is lent nothing is written into the ring, so bytes in the ring precede lent bytes.
    """

    __slots__ = (
        "_acquire", "_announced_read", "_arena", "_choice", "_given_up", "_in", "_in_size", "_in_span",
        "_in_words", "_lent", "_loan_read", "_loans", "_loans_read", "_most", "_open", "_out", "_out_size",
        "_out_span", "_out_words", "_peer_arena", "_read", "_reader_seen", "_ready", "_release", "_returned",
        "_revoked", "_rings", "_room", "_shown", "_sleeps", "_writer_seen", "_written", "ring_most_bytes",
    )  # fmt: skip

    carrier = "shared memory"
    peeks = True
    burst_bytes = sys.maxsize  # nothing is moved by lending

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        outward: Ring,
        inward: Ring,
        arena: Optional[Arena] = None,  # this process's, if the other end has mapped it
        peer_arena: Optional[PeerArena] = None,  # the other end's, if this end has its descriptor
    ) -> None:
        super().__init__(peer, sock)
        self._rings: List[Ring] = [outward, inward]
        self._out, self._out_words, self._out_size = outward.bytes, outward.words, outward.size
        self._in, self._in_words, self._in_size = inward.bytes, inward.words, inward.size
        self._out_span = self._out_words[SPAN] = min(outward.size, NEAR_BYTES)
        self._in_span = min(inward.size, NEAR_BYTES)
        # Only a ring that has more than the usual span leaves a choice.
        self._choice = SpanChoice(own_s_per_byte()) if outward.size > NEAR_BYTES else None
        self._open = True  # until this end closes, or finds that the other one has
        self._written = self._read = 0  # bytes in all
        self._announced_read = 0  # those read, as the other end has seen it
        self._room = self._out_span  # at least this many bytes more fit
        self._ready = 0  # at least this many bytes more have arrived
        self._reader_seen = self._writer_seen = 0  # the other end's states, as they were last handled
        self._sleeps = 0
        self._arena, self._peer_arena = arena, peer_arena
        self._given_up = self._revoked = False  # whether this end, and the other one, has revoked its loans
        self._loans = self._returned = 0  # pieces lent to the other end, and bytes returned, in all
        self._lent = 0  # bytes lent and not returned
        self._loans_read = 0  # pieces of the other end that have been read in all
        self._loan_read = 0  # bytes that have been read of the piece that comes next
        self._shown = False  # whether peek has shown lent bytes
        self._make_fence()
        self.lend_above(MASK)

    def lend_above(self, most_bytes: int) -> None:
        """Lend views of more bytes from now on, and send others through the ring."""
        self.ring_most_bytes = most_bytes
        self._set_most()

    def _set_most(self) -> None:
        """Set, while nothing is lent, up to which size bytes go through the ring without a closer look."""
        self._most = min(self.ring_most_bytes, MASK if self._arena is None else MIN_BYTES - 1)

    def _make_fence(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def _order(self) -> None:
        """Issue a memory barrier."""
        self._release()
        self._acquire()

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
            return self._send_through_ring((packet,), length)
        self._out[place : place + length] = packet
        self._announce_written(length)
        return length

    def _send_through_ring(self, views: Views, length: int) -> int:
        """Copy as much of the views as fits, up to a piece; return how many bytes."""
        if length > PIECE_BYTES + HEADER_BYTES:
            length = PIECE_BYTES
        choice = self._choice
        changes = choice is not None and choice.whole is not (self._out_span > NEAR_BYTES)
        if changes and self._look_for_room() == self._out_span:
            # The other end looks at this word when it finds bytes that it has not read: there are none.
            self._out_span = self._room = NEAR_BYTES if self._out_span > NEAR_BYTES else self._out_size
            self._out_words[SPAN] = self._out_span
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
            choice.note(length, perf_counter() - began_s)
        self._announce_written(length)
        return length

    def _look_for_room(self) -> int:
        """Return how many bytes fit into the ring."""
        unread = (self._written - self._out_words[READ]) & MASK
        if unread > self._out_span:
            raise LinkClosed(self.peer, "it claims to have read more than it was sent")
        if not self._open or self._out_words[READER_STATE] == CLOSED:
            raise LinkClosed(self.peer, _ENDED)
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

    def _meet_reader(self, state: int) -> None:
        """Wake the other end if it sleeps. No error if it has closed: it may have read all that it needs."""
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
        """Record that the other end reads no more."""
        self._open, self._room = False, 0

    # ---- lending -----------------------------------------------------------------------------

    def _loan(self, data: memoryview) -> Optional[Tuple[int, int]]:
        """Return the two words that lend these bytes; None to send them through the ring."""
        arena, nbytes = self._arena, data.nbytes
        if arena is None or (nbytes < MIN_BYTES and not self._lent):
            return None
        offset = arena.offset_of(address_of(data), nbytes)
        return None if offset is None else (offset, nbytes | IN_ARENA)

    def _send_large(self, views: Views) -> int:
        """Send views that are not for the ring, or not now; return how many bytes were taken."""
        if self._given_up:
            raise LinkClosed(self.peer, "this rank has given up a call in which it was used")
        if self._lent:
            return self._take_back() or self._lend(views, self._lent)
        length = 0
        for number, view in enumerate(views):
            if self._loan(flat(view)) is None:
                length += view.nbytes
                continue
            taken = self._send_through_ring(views[:number], length)
            return taken if taken < length else taken + self._lend(views[number:], 0)
        return self._send_through_ring(views, length)

    def _take_back(self) -> int:
        """Return how many of the lent bytes the other end has read since the last call."""
        words = self._out_words
        ended = not self._open or words[READER_STATE] == CLOSED
        if ended:
            self._order()  # The other end stored its returned bytes before it closed.
        returned = (words[RETURNED] - self._returned) & MASK
        if returned > self._lent:
            raise LinkClosed(self.peer, "it claims to have read more than it was lent")
        if ended and not returned:
            raise LinkClosed(self.peer, _ENDED)
        self._returned = (self._returned + returned) & MASK
        self._lent -= returned
        if not self._lent:
            self._set_most()
        return returned

    def _lend(self, views: Views, skip: int) -> int:
        """Lend the views after the first ``skip`` bytes while there are places; return 0: none count yet."""
        words, loans = self._out_words, self._loans
        for view in views:
            data = flat(view)
            if skip >= data.nbytes:
                skip -= data.nbytes
                continue
            data, skip = data[skip:], 0
            loan = self._loan(data)
            if loan is None or (loans - words[LOANS_READ]) & MASK >= MAX_LOANS:
                break
            place = LOANS + 2 * (loans % MAX_LOANS)
            words[place], words[place + 1] = loan
            loans = (loans + 1) & MASK
            self._lent += data.nbytes
        if loans != self._loans:
            self._most = -1
            self._loans = loans
            self._order()
            words[LENT] = loans
            self._order()
            state = words[READER_STATE]
            if state != self._reader_seen:
                self._meet_reader(state)
        return 0

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
        self._count_read(ready - left)
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
                return self._peek_lent(most_bytes, item_bytes) if self._has_otherwise() else _NOTHING
        place = self._read % self._in_span
        count = min(ready, most_bytes, self._in_span - place)
        if count < item_bytes <= ready:
            return None  # The next item begins at the end of the ring, and continues at its start.
        return self._in[place : place + count - count % item_bytes]

    def skip(self, count: int) -> bool:
        if not self._shown:
            self._count_read(count)
            return True
        self._shown = False
        if not self._still_lent():
            return False
        self._give_back(count)
        self._wake_writer()
        return True

    def _count_read(self, count: int) -> None:
        """Count bytes of the ring as read, and let the other end know from time to time."""
        self._ready -= count
        self._read = (self._read + count) & MASK
        if (self._read - self._announced_read) & MASK >= self._in_span // 4:
            self._announce_read()

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

    def _announce_read(self) -> None:
        """Let the other end overwrite the bytes that have been read."""
        self._announced_read = self._read
        self._order()
        self._in_words[READ] = self._read
        self._wake_writer()

    def _wake_writer(self) -> None:
        """Wake the other end if it waits for the word just stored."""
        self._order()
        state = self._in_words[WRITER_STATE]
        if state != self._writer_seen:
            self._writer_seen = state
            if state and state != CLOSED:
                self._kick()

    # ---- receiving lent bytes ----------------------------------------------------------------

    def _has_otherwise(self) -> bool:
        """Return whether anything was lent, or the stream has ended."""
        words = self._in_words
        return bool(words[LENT] != self._loans_read or not self._open or words[WRITER_STATE] == CLOSED)

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
        raise LinkClosed(self.peer, _ENDED)

    def _peek_lent(self, most_bytes: int, item_bytes: int) -> Optional[memoryview]:
        """Return the next lent bytes in the other end's arena; None if only :meth:`recv` gets them."""
        if self._ready or self._revoked or self._in_words[LENT] == self._loans_read:
            return None
        self._order()
        if self._look():
            return self.peek(most_bytes, item_bytes)
        place, count, in_arena = self._next_loan(most_bytes)
        if not in_arena or self._peer_arena is None or count < item_bytes:
            return None
        try:
            shown = self._peer_arena.view(place, count - count % item_bytes)
        except OSError as problem:
            raise self._unreadable(problem) from None
        self._shown = True
        return shown

    def _recv_lent(self, views: Views) -> int:
        words, got = self._in_words, 0
        if self._revoked:
            if self._open and words[WRITER_STATE] != CLOSED:
                return 0
            raise LinkClosed(self.peer, _ENDED)
        for view in views:
            data = flat(view)
            while data.nbytes and words[LENT] != self._loans_read:
                count = self._read_lent(data)
                if not count:
                    return got  # The peer has aborted the call: it only sends the reason, or closes the link.
                got += count
                data = data[count:]
        self._wake_writer()
        return got

    def _next_loan(self, most_bytes: int) -> Tuple[int, int, bool]:
        """Return the place of the next lent bytes, their number, and whether they lie in the arena."""
        words = self._in_words
        self._order()  # of the number of loans, and the place of this one
        place = LOANS + 2 * (self._loans_read % MAX_LOANS)
        address, length = words[place], words[place + 1]
        count = min(most_bytes, (length & ~IN_ARENA) - self._loan_read, _READ_MOST_BYTES)
        if count <= 0:
            raise LinkClosed(self.peer, "it lent nothing")
        return (address + self._loan_read) & MASK, count, bool(length & IN_ARENA)

    def _read_lent(self, view: memoryview) -> int:
        """Copy lent bytes of the other end; return how many, 0 if they were revoked."""
        address, count, in_arena = self._next_loan(view.nbytes)
        try:
            if not in_arena:
                self._read_other(address, view[:count])
            elif self._peer_arena is None:
                raise OSError("there is no such memory")
            else:
                view[:count] = self._peer_arena.view(address, count)
        except OSError as problem:
            if self._still_lent():
                raise self._unreadable(problem) from None
        if not self._still_lent():
            return 0
        self._give_back(count)
        return count

    def _read_other(self, address: int, into: memoryview) -> None:
        """Copy bytes outside the other end's arena; OSError if they are unreadable."""
        raise OSError("this end cannot read it")

    def _unreadable(self, problem: OSError) -> LinkClosed:
        return LinkClosed(self.peer, f"its memory cannot be read: {error_text(problem)}")

    def _still_lent(self) -> bool:
        """Return whether the bytes just read were not revoked meanwhile."""
        self._order()
        self._revoked = self._in_words[REVOKED] != 0
        return not self._revoked

    def _give_back(self, count: int) -> None:
        """Acknowledge this many lent bytes as read."""
        words = self._in_words
        self._loan_read += count
        place = LOANS + 2 * (self._loans_read % MAX_LOANS)
        if self._loan_read == words[place + 1] & ~IN_ARENA:
            self._loan_read = 0
            self._loans_read = (self._loans_read + 1) & MASK
            self._order()
            words[LOANS_READ] = self._loans_read
        self._order()
        words[RETURNED] = (words[RETURNED] + count) & MASK

    # ---- waiting and ending ------------------------------------------------------------------

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
        if self._revoked and self._open:
            return self._ready > 0
        return bool(self._ready or self._in_words[WRITTEN] != self._read or self._has_otherwise())

    def _may_send(self) -> bool:
        words = self._out_words
        if not self._open or words[READER_STATE] == CLOSED:
            return True
        if self._lent:
            return bool(words[RETURNED] != self._returned)
        return (self._written - words[READ]) & MASK != self._out_span

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
        self._out_words[REVOKED] = 1
        # Processors that reorder stores (ARM) must not let the peer see what the caller writes next first.
        self._order()
        self._given_up = True
        self._most = -1  # and nothing is sent any more

    def close(self) -> None:
        self.revoke()
        if self._rings:
            self._in_words[READER_STATE] = self._out_words[WRITER_STATE] = CLOSED
            self._end()
            self._in_words = self._out_words = memoryview(bytearray(CONTROL_BYTES)).cast("P")
            self._read = self._written = self._ready = 0
        super().close()
        for ring in self._rings:
            ring.close()
        self._rings, self._peer_arena = [], None
