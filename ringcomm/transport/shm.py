"""Links through memory that two processes share.

The sender copies bytes into its :class:`~ringcomm.transport.ring.Ring` and stores their number; the receiver
sees that, copies them out, and stores how many it has read. None of this is a system call. An end without
work for a while sleeps on the Unix socket between the two. Before that it stores that it sleeps, and looks
once more; the other end checks for that after each of its stores, and wakes it by a byte through the socket.

**Lending.** Bytes in the sender's :mod:`arena <.arena>` are not copied: the sender announces their place, and
the receiver reads them from its own mapping. (:class:`~.process_memory.ReadingLink` lends other memory too.)

**Revocation.** A lender that aborts a call (Ctrl-C, a time limit, an error) may overwrite its buffer at once,
while the peer still reads it. So it stores a word first, which the peer checks after it has read; bytes read
after a revocation are not counted.

**Memory barriers.** An end that sees a new position must also see the bytes before it, and an end that
goes to sleep must not miss a position that is stored at the same time. Processors reorder loads and stores,
ARM more than x86. Between the two stands a lock that is released and then taken: everything before the
release is ordered before everything after the acquisition.
"""

from __future__ import annotations

import select
import socket
import sys
import threading
from time import perf_counter
from typing import List, Optional, Tuple

from .arena import MIN_BYTES, Arena, PeerArena
from .base import LinkClosed, Views, address_of, flat
from .ring import (
    CLOSED,
    CONTROL_BYTES,
    IN_ARENA,
    LENT,
    LOANS,
    LOANS_READ,
    MASK,
    MAX_LOANS,
    NEAR_BYTES,
    READ,
    READER_STATE,
    RETURNED,
    REVOKED,
    SPAN,
    TIMED_BYTES,
    TIMED_PACKETS,
    WRITER_STATE,
    WRITTEN,
    Ring,
    SpanChoice,
    own_s_per_byte,
)
from .tcp import SocketLink, closed_reason

PIECE_BYTES = 512 * 1024
"""Copy at most this before the other end learns of it, so that both ends copy at the same time."""
_HARDLY_MORE = 1024
"""A piece may be this much longer: a header in front of a piece does not make two of it."""
LOOK_AGAIN_BYTES = 128 * 1024 * 1024
"""After this many bytes lent in the arena a few go through the ring, to see if the cores share a cache."""
_READ_MOST_BYTES = 2 * 1024 * 1024
"""Read at most this at once, so that the sender may continue with the bytes that were read."""
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
        "_out_span", "_out_words", "_packets", "_peer_arena", "_read", "_reader_seen", "_ready", "_release",
        "_returned", "_revoked", "_ring_most", "_rings", "_room", "_shown", "_sleeps", "_unseen_bytes",
        "_writer_seen", "_written",
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
        self._packets = 0  # since one was timed
        self._open = True  # until this end closes, or finds that the other one has
        self._written = 0  # bytes in all that this end has written
        self._room = self._out_span  # at least this many bytes more fit
        self._read = 0  # bytes in all that this end has read
        self._announced_read = 0  # the same, as the other end has seen it
        self._ready = 0  # at least this many bytes more have arrived
        self._reader_seen = self._writer_seen = 0  # the other end's states, as they were last handled
        self._sleeps = 0
        self._arena = arena
        self._peer_arena = peer_arena
        self._given_up = False  # whether this end has revoked its loans
        self._lent = 0  # bytes lent to the other end and not returned
        self._loans = 0  # pieces that this end has lent in all
        self._returned = 0  # bytes that have been returned in all
        self._loans_read = 0  # pieces of the other end that have been read in all
        self._loan_read = 0  # bytes that this end has read of the piece that comes next
        self._revoked = False  # whether the other end has revoked its loans
        self._shown = False  # whether peek has shown lent bytes
        self._unseen_bytes = 0  # lent in the arena since the ring was used to see the state of the cores
        self._make_fence()
        self.lend_above(MASK)

    def lend_above(self, most_bytes: int) -> None:
        """Lend views of more bytes from now on, and send others through the ring."""
        self._ring_most = most_bytes
        self._set_most()

    def _set_most(self) -> None:
        """Set, while nothing is lent, up to which size bytes go through the ring without a closer look."""
        self._most = self._ring_most if self._arena is None else min(self._ring_most, MIN_BYTES - 1)

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

    # ---- lending -----------------------------------------------------------------------------

    def _loan(self, data: memoryview) -> Optional[Tuple[int, int]]:
        """Return the two words that lend these bytes; None to send them through the ring."""
        arena, nbytes = self._arena, data.nbytes
        if arena is None or (nbytes < MIN_BYTES and not self._lent):
            return None
        offset = arena.offset_of(address_of(data), nbytes)
        if offset is None or (not self._lent and self._prefers_ring(nbytes)):
            return None
        self._unseen_bytes += nbytes
        return offset, nbytes | IN_ARENA

    def _prefers_ring(self, nbytes: int) -> bool:
        """Return whether the ring is better although the bytes lie in the arena. Between cores that share no
        cache it is: results are expensive to write where the other core has just read. Only copies into the
        ring show that, so some are made now and then.
        """
        choice = self._choice
        if choice is None or nbytes > self._ring_most:
            return False
        if self._unseen_bytes >= LOOK_AGAIN_BYTES:
            self._unseen_bytes = 0
            choice.look_again()
        return choice.looking or choice.whole

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
            self._store(words, LENT, loans)
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
                    # The peer has aborted the call. It sends nothing more but the reason, or closes the link.
                    self._revoked = True
                    return got
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
                count = self._read_other(address, view[:count])
            elif self._peer_arena is None:
                raise OSError("there is no such memory")
            else:
                view[:count] = self._peer_arena.view(address, count)
                count = count if self._still_lent() else 0
        except OSError as problem:
            raise self._unreadable(problem) from None
        if count:
            self._give_back(count)
        return count

    def _read_other(self, address: int, into: memoryview) -> int:
        """Copy bytes outside the other end's arena; return how many, 0 if revoked; OSError if unreadable."""
        raise OSError("this end cannot read it")

    def _unreadable(self, problem: OSError) -> LinkClosed:
        return LinkClosed(self.peer, f"its memory cannot be read: {closed_reason(problem)}")

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
            self._store(words, LOANS_READ, self._loans_read)
        self._store(words, RETURNED, (words[RETURNED] + count) & MASK)

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
        self._rings = []
        self._peer_arena = None
