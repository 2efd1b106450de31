"""Reading another process's memory on Linux: ``process_vm_readv``, without a copy in between.

The system permits it between processes of one user (unless a container or a security module
forbids it). It is a plain system call, reached through ctypes; nothing is compiled and nothing
stays behind when a process dies.

The receiver copies offered bytes directly to where they belong (or into a segment that stays in
its cache, to be reduced), so they cross memory once instead of four times through a TCP stream.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from typing import Any, List, Optional

import numpy as np

from .base import LinkClosed, Views
from .framed import INLINE_MOST_BYTES, LEND, flat, head, inlined
from .shm import Ring, SharedLink
from .tcp import closed_reason

RING_MOST_BYTES = 512 * 1024
"""Up to here two copies through shared memory are cheaper than one between two processes: those bytes are
in the cache, and the system has no pages to look up."""
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


class PeerMemory:
    """The memory of one other process of this machine.

    Args:
        pid: its number, as this process sees it.
    """

    __slots__ = ("_local", "_remote", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._local = _Span()
        self._remote = _Span()

    def read(self, address: int, into: memoryview) -> int:
        """Copy bytes from ``address`` over there into the view.

        Returns:
            how many bytes were copied; fewer than asked for if the rest is not mapped.

        Raises:
            OSError: the process is gone, or the system forbids it.
        """
        if _readv is None:
            raise OSError("this system cannot read another process's memory")
        local, remote = self._local, self._remote
        local.base, local.length = address_of(into), into.nbytes
        remote.base, remote.length = address, into.nbytes
        count = _readv(self.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return int(count)


class ReadingLink(SharedLink):
    """A link to a rank of the same host whose memory may be read, and which may read ours.

    What is large is lent: its place is an address in the sender's memory. Views given to :meth:`send` and
    not taken must be given again, from the first byte that was not taken on; lent bytes are taken when
    the peer has read them. What is small goes through the socket, and what is between through shared
    memory, if there is any.

    Args:
        memory: the other process's.
        outward, inward: rings of shared memory, if there are any; owned by the link.
    """

    __slots__ = ("_lend_from", "_lent", "_memory")

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
        outward: Optional[Ring] = None,
        inward: Optional[Ring] = None,
    ) -> None:
        super().__init__(peer, sock, outward, inward)
        self._memory = memory
        self._lent = 0  # bytes lent to the peer and not read by it
        self._lend_from = (INLINE_MOST_BYTES if outward is None else RING_MOST_BYTES) + 1

    def send(self, views: Views) -> int:
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
        return super().send(views)

    def _post(self, views: Views) -> int:
        """Send what is small and lend what is large, beyond what is lent already."""
        skip = self._lent
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
            if length <= INLINE_MOST_BYTES and not self._lent:
                small.append(data)
                taken += length
                continue
            frames += inlined(small)
            small = []
            if self._lent or length >= self._lend_from:
                # Whatever follows what is lent is lent, too: bytes are taken in their order.
                frames.append(head(LEND, length, address_of(data)))
                self._lent += length
            else:
                count = self._put(data, frames)
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
