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
from .framed import SHORT_BYTES, FramedLink, flat, inline_head, offer
from .tcp import closed_reason

INLINE_MOST_BYTES = 16 * 1024
"""Up to here a copy through the socket is cheaper than an offer, a read and an answer."""
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


class ReadingLink(FramedLink):
    """A link to a rank of the same host whose memory may be read, and which may read ours.

    A place is an address in the sender's memory. Views given to :meth:`send` and not taken must be
    given again, from the first byte that was not taken on; offered bytes are taken when the peer
    has read them.
    """

    __slots__ = ("_memory", "_offered")

    # A read costs some 7 us however short it is, and as much again for every 64 KiB.
    segment_bytes = 1024 * 1024
    burst_bytes = sys.maxsize  # nothing is moved by sending
    answer_every_bytes = 1024 * 1024

    carrier = "each other's memory"

    def __init__(self, peer: int, sock: socket.socket, memory: PeerMemory) -> None:
        super().__init__(peer, sock)
        self._memory = memory
        self._offered = 0  # bytes offered to the peer and not read by it

    def send(self, views: Views) -> int:
        if self._offered:
            # Even while our own frames are stuck: the peer's may be what they are waiting for.
            if not self._arrived:
                self._pump()
            if self._arrived:
                taken, self._arrived = self._arrived, 0
                if taken > self._offered:
                    raise LinkClosed(self.peer, "it claims to have read more than it was offered")
                self._offered -= taken
                return taken
        if self._unsent and not self._flush():
            return 0
        if len(views) == 1 and 0 < views[0].nbytes <= SHORT_BYTES and not self._offered:
            return self._send_short(views[0])
        return self._post(views)

    def _post(self, views: Views) -> int:
        """Send what is small and offer what is large, beyond what is offered already."""
        skip = self._offered
        frames: List[memoryview] = []
        taken = 0
        for view in views:
            data = flat(view)
            if skip >= data.nbytes:
                skip -= data.nbytes
                continue
            if skip:
                data, skip = data[skip:], 0
            if data.nbytes <= INLINE_MOST_BYTES and not self._offered:
                frames += (memoryview(inline_head(data.nbytes)), data)
                taken += data.nbytes
            else:
                frames.append(memoryview(offer(data.nbytes, address_of(data))))
                self._offered += data.nbytes
        if frames:
            self._write(frames)
        return taken

    def _fetch(self, place: int, view: memoryview) -> int:
        try:
            return self._memory.read(place, view[:_READ_MOST_BYTES])
        except OSError as problem:
            raise LinkClosed(self.peer, f"its memory cannot be read: {closed_reason(problem)}") from None

    def _next_piece(self, view: memoryview) -> int:
        count = super()._next_piece(view)
        if not self._queue:
            # The sender may not go on before it knows.
            self._answer()
        return count

    def _waits_for_answer(self) -> bool:
        return self._offered > 0
