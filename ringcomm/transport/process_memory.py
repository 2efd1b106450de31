"""Reading another process's memory on Linux: ``process_vm_readv``, without a copy in between.

The system permits it between processes of one user (unless a container or a security module
forbids it). It is a plain system call, called with ctypes; nothing is compiled and nothing
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
import threading
from typing import Any, Optional, Tuple

from .arena import Arena, PeerArena
from .base import address_of
from .ring import Ring
from .shm import SharedLink

TOKEN_BYTES = 32
RING_MOST_BYTES = 1024 * 1024
"""Limit of the ring if nothing was measured: two copies in the cache. Larger views are lent: one copy, but
the system looks every page up."""


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


class Lease:
    """Permission to read this process's memory over one link, stored in that memory itself: ``address`` holds
    ``token`` while the lease is valid.
    """

    __slots__ = ("_bytes", "_fence", "address", "token")

    def __init__(self) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self._bytes = bytearray(self.token)
        self.address = address_of(memoryview(self._bytes))
        self._fence = threading.Lock()

    def revoke(self) -> None:
        """End the lease: a peer discards whatever it reads from now on. May be called again."""
        self._bytes[:] = bytes(TOKEN_BYTES)
        # Processors that reorder stores (ARM) must not let the peer see what the caller writes next before
        # it can see this. A lock released and then taken puts stores before the one and after the other.
        for _ in range(2):
            with self._fence:
                pass


class PeerMemory:
    """The memory of another process of this machine, readable while ``place`` holds ``token``, its lease."""

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
        """Copy bytes from ``address`` of that process into the view; return their number, or 0 if the lease
        was revoked (the contents are undefined then). Raises OSError if the process is gone, the system
        forbids it, or there is no such memory.
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
        """Return whether the lease is valid; raises OSError as :meth:`read` does."""
        self._local[0].length = self._remote[0].length = 0
        count = _readv(self.pid, self._local, 2, self._remote, 2, 0) if _readv is not None else -1
        if count < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return count == TOKEN_BYTES and self._seen == self._token


class ReadingLink(SharedLink):
    """A link to a rank of the same host whose memory may be read, and which may read ours. It owns the rings.

    Large views are lent wherever they lie: the other end learns their address and reads them. Small ones go
    through shared memory. While anything is lent, all that follows is lent as well.
    """

    __slots__ = ("_lease", "_memory")

    # A read costs some 7 us however short it is, and as much again for every 64 KiB.
    segment_bytes = 1024 * 1024
    lends = True

    carrier = "each other's memory"

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        memory: PeerMemory,
        lease: Lease,  # this process's, which the other process holds
        outward: Ring,
        inward: Ring,
        arena: Optional[Arena] = None,
        peer_arena: Optional[PeerArena] = None,
    ) -> None:
        super().__init__(peer, sock, outward, inward, arena, peer_arena)
        self._memory = memory
        self._lease = lease
        self.lend_above(RING_MOST_BYTES)

    @property
    def ring_most_bytes(self) -> int:
        """Views of at most this length go through the ring."""
        return self._ring_most

    def _loan(self, data: memoryview) -> Optional[Tuple[int, int]]:
        loan = super()._loan(data)
        if loan is None and (self._lent or data.nbytes > self._ring_most):
            return address_of(data), data.nbytes
        return loan

    def _read_other(self, address: int, into: memoryview) -> int:
        return self._memory.read(address, into)

    def revoke(self) -> None:
        super().revoke()
        self._lease.revoke()
