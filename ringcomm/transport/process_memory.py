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
from typing import Any, List, Optional

import numpy as np

from .base import LinkClosed, Views
from .framed import LEND, OFFER, ONLY_LENT, SHORT_BYTES, Carriers, head, inlined
from .shm import Ring, SharedLink
from .tcp import closed_reason
from .views import flat

TOKEN_BYTES = 32
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
    """Whether this system has the call at all."""
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
        """Whether the lease is valid.

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

    What is large is lent: its place is an address in the sender's memory. Views given to :meth:`send` and
    not taken must be given again, from the first byte that was not taken on; lent bytes are taken when
    the peer has read them. What is small goes through the socket, and what is between through shared
    memory, if there is any.

    Args:
        memory: the other process's.
        lease: this process's lease, which the other process holds.
        outward, inward: rings of shared memory, if there are any; owned by the link.
    """

    __slots__ = ("_lease", "_memory")

    # A read costs some 7 us however short it is, and as much again for every 64 KiB.
    segment_bytes = 1024 * 1024
    burst_bytes = sys.maxsize  # nothing is moved by sending
    lends = True

    carrier = "each other's memory"

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        memory: PeerMemory,
        lease: Lease,
        outward: Optional[Ring] = None,
        inward: Optional[Ring] = None,
    ) -> None:
        super().__init__(peer, sock, outward, inward)
        self._memory = memory
        self._lease: Optional[Lease] = lease

    def ways(self) -> List[Carriers]:
        """Those of shared memory, and lending."""
        return [*super().ways(), ONLY_LENT]

    def _send_large(self, views: Views) -> int:
        if self._lease is None:
            raise LinkClosed(self.peer, "this rank has given up a call in which it was used")
        if self._lent:
            # Even while our own frames are stuck: the peer's may be what they are waiting for.
            if not self._answers[LEND]:
                self._pump()
            if self._answers[LEND]:
                taken, self._answers[LEND] = self._answers[LEND], 0
                if taken > self._lent:
                    raise LinkClosed(self.peer, "it claims to have read more than it was lent")
                self._lent -= taken
                return taken
            if self._unsent and not self._flush():
                return 0
            return self._post(views)
        return super()._send_large(views)

    def _post(self, views: Views) -> int:
        """Send what is small and lend what is large, beyond what is lent already."""
        skip = self._lent
        if not skip and self._outward is not None:
            most = self.carriers.ring_most_bytes
            if all(view.nbytes <= most for view in views):
                return super()._post(views)
        lend_from = 1 + (SHORT_BYTES if self._outward is None else self.carriers.ring_most_bytes)
        frames: List[memoryview] = []
        small: List[memoryview] = []
        taken = 0
        for view in views:
            data = flat(view)
            if skip >= data.nbytes:
                skip -= data.nbytes
                continue
            if skip:
                data, skip = data[skip:], 0
            length = data.nbytes
            if length <= SHORT_BYTES and not self._lent:
                small.append(data)
                taken += length
                continue
            frames += inlined(small)
            small = []
            if self._lent or length >= lend_from:
                # Whatever follows what is lent is lent, too: bytes are taken in their order.
                frames.append(head(LEND, length, address_of(data)))
                self._lent += length
            else:
                place, count = self._write_at, self._put(data)
                frames += [head(OFFER, count, place)] if count else []
                taken += count
                if count < length:
                    break
        frames += inlined(small)
        if frames:
            self._write(frames)
        return taken

    def _fetch(self, kind: int, place: int, view: memoryview) -> int:
        if kind != LEND:
            return super()._fetch(kind, place, view)
        try:
            return self._memory.read(place, view[:_READ_MOST_BYTES])
        except OSError as problem:
            raise LinkClosed(self.peer, f"its memory cannot be read: {closed_reason(problem)}") from None

    def _waits_for_answer(self) -> bool:
        return self._lent > 0 or (self._outward is not None and super()._waits_for_answer())

    def revoke(self) -> None:
        if self._lease is not None:
            self._lease.revoke()
            self._lease = None
            self._inline_most = 0  # and nothing is sent any more

    def close(self) -> None:
        self.revoke()
        super().close()
