"""Reading another process's memory on Linux: ``process_vm_readv``, without a copy in between.

The system permits it between processes of one user (unless a container or a security module
forbids it). It is a plain system call, reached through ctypes; nothing is compiled and nothing
stays behind when a process dies.

The receiver copies offered bytes directly to where they belong (or into a segment that stays in
its cache, to be reduced), so they cross memory once instead of four times through a TCP stream.

**Revocation.** A lender that aborts a call (Ctrl-C, a time limit, an error) may overwrite its buffer at
once, while the peer still reads it. So each end of a link has a :class:`Lease`: random bytes in its own
memory, which the peer has from the start and which are cleared before an exception leaves the call. With
every read the peer also reads the lease, after the data and by the same system call, and takes the data only
if the lease was still valid.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
import threading
from typing import Any, Optional

import numpy as np

from .base import LinkClosed, Views
from .ring import (
    CLOSED,
    LENT,
    LOANS,
    LOANS_READ,
    MASK,
    MAX_LOANS,
    READER_STATE,
    RETURNED,
    WRITER_STATE,
    Ring,
)
from .shm import ENDED, SharedLink
from .tcp import closed_reason
from .views import flat

TOKEN_BYTES = 32
RING_MOST_BYTES = 1024 * 1024
"""Up to here through shared memory, if nothing was measured: two copies in the cache. What is larger is lent:
one copy, but the system looks every page up."""
_READ_MOST_BYTES = 2 * 1024 * 1024
"""Read no more at once, so that the sender may go on with what has been read."""


class _Span(ctypes.Structure):
    """C's ``struct iovec``."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _find() -> Optional[Any]:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError, TypeError):
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Span),
        ctypes.c_ulong,
        ctypes.POINTER(_Span),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    return function


_readv = _find()


def available() -> bool:
    """Return whether this system has the call at all."""
    return _readv is not None


def address_of(view: memoryview) -> int:
    """Where a contiguous view's bytes lie in this process."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Lease:
    """Whether this process's memory may still be read over one link, in that memory itself.

    Attributes:
        token: what the bytes at ``address`` are while the lease is valid.
        address: where they are.
    """

    __slots__ = ("_bytes", "_fence", "address", "token")

    def __init__(self) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self._bytes = bytearray(self.token)
        self.address = address_of(memoryview(self._bytes))
        self._fence = threading.Lock()

    def revoke(self) -> None:
        """End the lease: what a peer reads from now on, it does not take. Doing it again is harmless."""
        self._bytes[:] = bytes(TOKEN_BYTES)
        # Processors that reorder stores (ARM) must not let the peer see what the caller writes next before
        # it can see this. A lock released and then taken puts stores before the one and after the other.
        for _ in range(2):
            with self._fence:
                pass


class PeerMemory:
    """The memory of one other process of this machine.

    Args:
        pid: its number, as this process sees it.
        place: the address of its lease for this link.
        token: what is there while the lease is valid.
    """

    __slots__ = ("_local", "_remote", "_seen", "_token", "pid")

    def __init__(self, pid: int, place: int, token: bytes) -> None:
        self.pid = pid
        self._token = token
        self._seen = bytearray(TOKEN_BYTES)
        self._local = (_Span * 2)()
        self._remote = (_Span * 2)()
        self._local[1].base, self._local[1].length = address_of(memoryview(self._seen)), TOKEN_BYTES
        self._remote[1].base, self._remote[1].length = place, TOKEN_BYTES

    def read(self, address: int, into: memoryview) -> int:
        """Copy bytes from ``address`` over there into the view, as long as the lease is valid.

        Returns:
            how many bytes were copied: all, or 0 if the lease was revoked. The view holds anything then.

        Raises:
            OSError: the process is gone, the system forbids it, or there is no such memory.
        """
        if _readv is None:
            raise OSError("this system cannot read another process's memory")
        length = into.nbytes
        local, remote = self._local[0], self._remote[0]
        local.base, local.length = address_of(into), length
        remote.base, remote.length = address, length
        # The system copies the spans in their order. Between them it gives back the pages of the first by
        # atomic operations that order all loads before and after them.
        count = _readv(self.pid, self._local, 2, self._remote, 2, 0)
        if count == length + TOKEN_BYTES:
            return length if self._seen == self._token else 0
        number = ctypes.get_errno() if count < 0 else errno.EFAULT
        if number == errno.EFAULT and length and not self._valid():
            return 0  # Revoked, and then given back to the system.
        raise OSError(number, os.strerror(number))

    def _valid(self) -> bool:
        """Return whether the lease is valid.

        Raises:
            OSError: as :meth:`read`.
        """
        self._local[0].length = self._remote[0].length = 0
        count = _readv(self.pid, self._local, 2, self._remote, 2, 0) if _readv is not None else -1
        if count < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return count == TOKEN_BYTES and self._seen == self._token


class ReadingLink(SharedLink):
    """A link to a rank of the same host whose memory may be read, and which may read ours.

    What is large is lent: the other end learns its address and reads it. Views given to :meth:`send` and not
    taken must be given again, from the first byte that was not taken on; lent bytes are taken when the
    other end has read them. What is small goes through shared memory. While anything is lent all that
    follows is lent, too, and nothing else is written: so what is in the ring comes before what is lent.

    Args:
        memory: the other process's.
        lease: this process's lease, which the other process holds.
        outward, inward: rings of shared memory, owned by the link.
    """

    __slots__ = ("_lease", "_lent", "_loan_read", "_loans", "_memory", "_returned", "_revoked", "_ring_most")

    # A read costs some 7 us however short it is, and as much again for every 64 KiB.
    segment_bytes = 1024 * 1024
    burst_bytes = sys.maxsize  # nothing is moved by lending
    lends = True

    carrier = "each other's memory"

    def __init__(
        self, peer: int, sock: socket.socket, memory: PeerMemory, lease: Lease, outward: Ring, inward: Ring
    ) -> None:
        super().__init__(peer, sock, outward, inward)
        self._memory = memory
        self._lease: Optional[Lease] = lease
        self._lent = 0  # bytes lent to the other end and not returned
        self._loans = 0  # pieces that this end has lent in all
        self._returned = 0  # bytes that have been returned in all
        self._loan_read = 0  # bytes that this end has read of the piece that comes next
        self._revoked = False  # whether the other end has revoked what it has lent
        self.lend_above(RING_MOST_BYTES)

    def lend_above(self, most_bytes: int) -> None:
        """From now on lend views of more bytes, and send others through the ring."""
        self._ring_most = self._most = most_bytes

    @property
    def ring_most_bytes(self) -> int:
        """Up to so many bytes go through the ring."""
        return self._ring_most

    def _send_large(self, views: Views) -> int:
        if self._lease is None:
            raise LinkClosed(self.peer, "this rank has given up a call in which it was used")
        if self._lent:
            return self._take_back() or self._lend(views, self._lent)
        length = 0
        for number, view in enumerate(views):
            if view.nbytes <= self._ring_most:
                length += view.nbytes
                continue
            taken = self._send_through_ring(views[:number], length)
            return taken if taken < length else taken + self._lend(views[number:], 0)
        return self._send_through_ring(views, length)

    def _take_back(self) -> int:
        """Return how many of the lent bytes the other end has read since the last time."""
        words = self._out_words
        ended = not self._open or words[READER_STATE] == CLOSED
        if ended:
            self._order()  # The other end stored what it returned before it closed.
        returned = (words[RETURNED] - self._returned) & MASK
        if returned > self._lent:
            raise LinkClosed(self.peer, "it claims to have read more than it was lent")
        if ended and not returned:
            raise LinkClosed(self.peer, ENDED)
        self._returned = (self._returned + returned) & MASK
        self._lent -= returned
        if not self._lent:
            self._most = self._ring_most
        return returned

    def _lend(self, views: Views, skip: int) -> int:
        """Lend the views beyond the first bytes, as many as there are places for; none of it counts yet."""
        words, loans = self._out_words, self._loans
        for view in views:
            data = flat(view)
            if skip >= data.nbytes:
                skip -= data.nbytes
                continue
            if (loans - words[LOANS_READ]) & MASK >= MAX_LOANS:
                break
            data, skip = data[skip:], 0
            place = LOANS + 2 * (loans % MAX_LOANS)
            words[place], words[place + 1] = address_of(data), data.nbytes
            loans = (loans + 1) & MASK
            self._lent += data.nbytes
        if loans != self._loans:
            self._most = -1
            self._loans = loans
            self._store(words, LENT, loans)
            self._wake_reader()
        return 0

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

    def _read_lent(self, view: memoryview) -> int:
        """Read the front of what has been lent into the view; how many bytes, 0 if it has been revoked."""
        words = self._in_words
        self._order()  # of what was seen to be lent, and the place of it
        place = LOANS + 2 * (self._loans_read % MAX_LOANS)
        address, length = words[place], words[place + 1]
        count = min(view.nbytes, length - self._loan_read, _READ_MOST_BYTES)
        if count <= 0:
            raise LinkClosed(self.peer, "it lent nothing")
        try:
            count = self._memory.read((address + self._loan_read) & MASK, view[:count])
        except OSError as problem:
            raise LinkClosed(self.peer, f"its memory cannot be read: {closed_reason(problem)}") from None
        if not count:
            return 0
        self._loan_read += count
        if self._loan_read == length:
            self._loan_read = 0
            self._loans_read = (self._loans_read + 1) & MASK
            words[LOANS_READ] = self._loans_read
        self._store(words, RETURNED, (words[RETURNED] + count) & MASK)
        return count

    def _may_receive(self) -> bool:
        return super()._may_receive() and not (self._revoked and self._open and not self._ready)

    def _may_send(self) -> bool:
        if not self._lent:
            return super()._may_send()
        words = self._out_words
        return not self._open or words[RETURNED] != self._returned or words[READER_STATE] == CLOSED

    def revoke(self) -> None:
        super().revoke()
        if self._lease is not None:
            self._lease.revoke()
            self._lease = None
            self._most = -1  # and nothing is sent any more

    def close(self) -> None:
        self.revoke()
        super().close()
