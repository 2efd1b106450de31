"""Links within a host that lend: the sender announces where its bytes lie, and the receiver reads them there.

The receiver reads the sender's :mod:`arena <.arena>` from its own mapping of it. Other memory is lent by
:class:`~.process_memory.ReadingLink` only, where the system lets one process read another's.

**Revocation.** A lender that aborts a call (Ctrl-C, a time limit, an error) may overwrite its buffer at once,
while the peer still reads it. So it stores a word first, which the peer checks after it has read; bytes read
after a revocation are not counted.
"""

from __future__ import annotations

import socket
import sys
from typing import Optional, Tuple

from .arena import MIN_BYTES, Arena, PeerArena
from .base import LinkClosed, Views
from .ring import (
    CLOSED,
    IN_ARENA,
    LENT,
    LOANS,
    LOANS_READ,
    MASK,
    MAX_LOANS,
    READER_STATE,
    RETURNED,
    REVOKED,
    WRITER_STATE,
    Ring,
)
from .shm import ENDED, SharedLink
from .tcp import closed_reason
from .views import address_of, flat

LOOK_AGAIN_BYTES = 128 * 1024 * 1024
"""After this many bytes lent in the arena a few go through the ring, to see if the cores share a cache."""
_READ_MOST_BYTES = 2 * 1024 * 1024
"""Read at most this at once, so that the sender may continue with the bytes that were read."""


class LendingLink(SharedLink):
    """A link to a rank of the same host, one of which has mapped the other's arena. It owns the rings.

    Views given to :meth:`send` and not taken must be given again, from the first byte that was not taken on;
    lent bytes are taken when the other end has read them. While anything is lent nothing is written into the
    ring, so bytes in the ring precede lent bytes.
    """

    __slots__ = (
        "_arena", "_given_up", "_lent", "_loan_read", "_loans", "_peer_arena", "_returned", "_revoked",
        "_ring_most", "_shown", "_unseen_bytes",
    )  # fmt: skip

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
        super().__init__(peer, sock, outward, inward)
        self._arena = arena
        self._peer_arena = peer_arena
        self._given_up = False  # whether this end has revoked its loans
        self._lent = 0  # bytes lent to the other end and not returned
        self._loans = 0  # pieces that this end has lent in all
        self._returned = 0  # bytes that have been returned in all
        self._loan_read = 0  # bytes that this end has read of the piece that comes next
        self._revoked = False  # whether the other end has revoked its loans
        self._shown = False  # whether peek has shown lent bytes
        self._unseen_bytes = 0  # lent in the arena since the ring was used to see the state of the cores
        self.lend_above(MASK)

    def lend_above(self, most_bytes: int) -> None:
        """Lend views of more bytes from now on, and send others through the ring."""
        self._ring_most = most_bytes
        self._set_most()

    def _set_most(self) -> None:
        """Set, while nothing is lent, up to which size bytes go through the ring without a closer look."""
        self._most = self._ring_most if self._arena is None else min(self._ring_most, MIN_BYTES - 1)

    # ---- sending -----------------------------------------------------------------------------

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
            raise LinkClosed(self.peer, ENDED)
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
            self._wake_reader()
        return 0

    # ---- receiving ---------------------------------------------------------------------------

    def peek(self, most_bytes: int, item_bytes: int) -> Optional[memoryview]:
        shown = super().peek(most_bytes, item_bytes)
        if shown is not None or self._ready or self._revoked or self._in_words[LENT] == self._loans_read:
            return shown
        self._order()
        if self._look():
            return super().peek(most_bytes, item_bytes)
        place, count, in_arena = self._next_loan(most_bytes)
        if not in_arena or self._peer_arena is None or count < item_bytes:
            return None
        try:
            shown = self._peer_arena.view(place, count - count % item_bytes)
        except OSError as problem:
            raise self._unreadable(problem) from None
        self._shown = shown is not None
        return shown

    def skip(self, count: int) -> bool:
        if not self._shown:
            return super().skip(count)
        self._shown = False
        if not self._still_lent():
            return False
        self._give_back(count)
        self._wake_writer()
        return True

    def _recv_lent(self, views: Views) -> int:
        words, got = self._in_words, 0
        if self._revoked:
            if self._open and words[WRITER_STATE] != CLOSED:
                return 0
            raise LinkClosed(self.peer, ENDED)
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
                self._peer_arena.read(address, view[:count])
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

    def _may_receive(self) -> bool:
        return super()._may_receive() and not (self._revoked and self._open and not self._ready)

    def _may_send(self) -> bool:
        if not self._lent:
            return super()._may_send()
        words = self._out_words
        return not self._open or words[RETURNED] != self._returned or words[READER_STATE] == CLOSED

    def revoke(self) -> None:
        super().revoke()
        self._out_words[REVOKED] = 1
        # Processors that reorder stores (ARM) must not let the peer see what the caller writes next first.
        self._order()
        self._given_up = True
        self._most = -1  # and nothing is sent any more

    def close(self) -> None:
        self.revoke()
        super().close()
        self._peer_arena = None
