"""A ring of bytes in memory that two processes share: one end writes it, the other reads it.

In front of the bytes are words, each written by one end only: how much has been written, how much has been
read, and whether an end sleeps. So nothing but the wake-up of a sleeping end goes through the system.

Each end makes the ring for its outgoing bytes: anonymous memory, without a name in any file system, that it
passes to the other end through their Unix socket. When the processes end, however they end, the system frees
it. It is sealed, so that no process can shrink it: reading beyond its end kills a process (SIGBUS).

A sender uses a part of its ring, or all of it, and decides by how long its copies into the ring take.
Between cores that share a cache a small part is best: it stays in the cache. Between cores that share none
it is expensive to write lines that the other core still has in its cache from reading them: on two
processors of a virtual machine 225 us for 512 KiB, where a shared cache needs 55. A core's cache evicts
lines as it reads more. So there the sender uses all of a ring that is larger than such a cache. On a
virtual machine the state changes within seconds, so the small part is tried again and again.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
import sys
import time
from typing import Optional, Tuple

import numpy as np

RING_BYTES = 8 * 1024 * 1024
"""More than a core's own cache holds; see :mod:`~ringcomm.transport.ring`."""
NEAR_BYTES = 1024 * 1024
"""The part used between cores that share a cache: large enough to keep both ends busy, small enough to stay
in a processor's cache. Also the whole ring, where several ranks share a host."""
SMALL_RING_BYTES = 64 * 1024
"""Where many ranks share a host and each has a ring for every other one."""
SIZES = (RING_BYTES, RING_BYTES // 2, RING_BYTES // 4, NEAR_BYTES, SMALL_RING_BYTES)

CONTROL_BYTES = 512 * struct.calcsize("P")
"""Differs between processes of 32 and 64 bits, as their words do: neither takes the other's memory."""
_LINES = 16
"""Words between two of them: a processor moves whole cache lines, often two at once."""
WRITTEN, READ = 0 * _LINES, 1 * _LINES
"""Bytes written in all, and how many of them have been read and may be overwritten."""
WRITER_STATE, READER_STATE = 2 * _LINES, 3 * _LINES
"""0 while that end is awake, another number each time it sleeps, and at last :data:`CLOSED`."""
LENT, LOANS_READ, RETURNED = 4 * _LINES, 5 * _LINES, 6 * _LINES
"""Pieces of its own memory that the writer has lent, and how many pieces and bytes of them have been read."""
SPAN = 7 * _LINES
"""How many of the ring's bytes are in use, a power of two: a byte lies at its position modulo this. The
writer changes it only while all written bytes have been read."""
LOANS = 8 * _LINES
"""From here on two words for each lent piece, its address and its length, cyclically."""
MAX_LOANS = 16
REVOKED = 10 * _LINES
"""Not 0 if the writer has revoked the lent pieces: it may have overwritten them."""
MASK = 2 * sys.maxsize + 1
"""Words count up to here and then from 0 again. The outstanding bytes are always far fewer."""
CLOSED = MASK
IN_ARENA = MASK - MASK // 2
"""Added to the length of a piece in the lender's arena, whose offset there replaces the address."""
_ADD_SEALS, _GET_SEALS, _SEAL_SHRINK = 1033, 1034, 2  # of fcntl; Python has them on Linux only


class Ring:
    """Shared memory with control words (the constants of this module) in front. Owns ``descriptor``, and
    closes it when it is not needed any more; raises OSError if it cannot be mapped or is not of a ring's
    size.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
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

    def pass_on(self, sock: socket.socket, message: bytes) -> None:
        """Send one byte, and the memory with it, through a Unix socket."""
        send_descriptor(sock, message, self._descriptor)
        self._close_descriptor()

    @classmethod
    def take(cls, sock: socket.socket) -> Tuple[bytes, Optional[Ring]]:
        """Receive one byte, and the ring that came with it, if there is a usable one."""
        message, descriptor = receive_memory(sock)
        try:
            ring = None if descriptor is None else cls(descriptor)
        except OSError:
            return message, None
        if ring is not None:
            ring._close_descriptor()
        return message, ring

    def duplicate(self) -> Ring:
        """Map the same memory once more, for another end in this process."""
        return Ring(os.dup(self._descriptor))

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        """Release the memory. May be called again."""
        self._close_descriptor()
        self.words.release()
        try:
            self.bytes.release()
            self._map.close()
        except BufferError:
            pass  # An array still shows some of it, and the memory goes with the array.


def nameless() -> int:
    """Return a descriptor of anonymous memory that no process can shrink; raises OSError where there is none.

    Other processes get it only by receiving the descriptor.
    """
    try:
        import fcntl

        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING  # type: ignore[attr-defined,unused-ignore]
        descriptor: int = os.memfd_create("ringcomm", flags)  # type: ignore[attr-defined,unused-ignore]
    except (ImportError, AttributeError):
        raise OSError("this system has no shared memory without a name") from None
    try:
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def send_descriptor(sock: socket.socket, message: bytes, descriptor: int) -> None:
    """Send one byte, and a descriptor with it, through a Unix socket."""
    sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])


def receive_memory(sock: socket.socket) -> Tuple[bytes, Optional[int]]:
    """Receive one byte, and the descriptor of sealed memory that came with it, if any."""
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(descriptors.itemsize)
    message, extras, _, _ = sock.recvmsg(1, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    for level, kind, content in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    if not message:
        raise ConnectionError("it closed the connection")
    if not descriptors:
        return message, None
    if _is_sealed(descriptors[0]):
        return message, descriptors[0]
    os.close(descriptors[0])
    return message, None


def _is_sealed(descriptor: int) -> bool:
    import fcntl

    try:
        return bool(fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK)
    except OSError:
        return False  # No file of this kind has seals.


# -- how much of a ring is used --------------------------------------------------------------------

TIMED_BYTES = 16 * 1024
"""Shorter copies are not timed: reading the clock would take too large a part of them."""
TIMED_PACKETS = 4
"""Of short packets one in this many is timed: timing takes a microsecond."""
WINDOW = 4
"""The shortest of this many copies decides: a process that lost its core in between does not."""
SKIPPED_BYTES = 1024 * 1024
"""After a change the lines in the ring are in no cache yet, and writing them is cheap in either state."""
STINT_BYTES = 512 * 1024 * 1024
"""After this many bytes through the whole ring its small part is tried again; that costs about 1 %."""
EXPENSIVE = 8.0
"""Factor by which a copy into the ring takes longer than one within this core's own cache. (3 to 5 between
cores of an AMD EPYC that share a cache, 12 to 18 between others.)"""
_OWN_BYTES = 128 * 1024

_own_s_per_byte: Optional[float] = None


def own_s_per_byte() -> float:
    """Return the seconds per byte of a copy within this core's cache; the first call measures for 200 us."""
    global _own_s_per_byte
    if _own_s_per_byte is None:
        source, target = np.ones(_OWN_BYTES, np.uint8), np.zeros(_OWN_BYTES, np.uint8)
        shortest_s = float("inf")
        for _ in range(16):
            began_s = time.perf_counter()
            target[:] = source
            shortest_s = min(shortest_s, time.perf_counter() - began_s)
        _own_s_per_byte = max(shortest_s, 1e-9) / _OWN_BYTES
    return _own_s_per_byte


class SpanChoice:
    """Whether to use the whole ring, for one sender."""

    __slots__ = ("_bytes", "_limit_s_per_byte", "_seen", "_shortest", "looking", "whole")

    def __init__(self, own_s_per_byte: float) -> None:
        self._limit_s_per_byte = EXPENSIVE * own_s_per_byte
        self.whole = False
        self.look_again()

    def look_again(self) -> None:
        """Decide again, by the copies that follow."""
        self.looking = True
        self._restart()

    def _restart(self) -> None:
        self._bytes = 0  # copied since the last change
        self._seen = 0  # copies of this window
        self._shortest = float("inf")  # of them, per byte

    def note(self, count: int, elapsed_s: float, copies: int = 1) -> None:
        """Take a timed copy of ``count`` bytes into account, which stands for ``copies`` of this length, and
        change ``whole`` if due.
        """
        self._bytes += copies * count
        if self.whole:
            if self._bytes >= STINT_BYTES:
                self.whole = False
                self.look_again()
            return
        if self._bytes < SKIPPED_BYTES:
            return
        self._shortest = min(self._shortest, elapsed_s / count)
        self._seen += 1
        if self._seen == WINDOW:
            self.whole = self._shortest > self._limit_s_per_byte
            self._seen, self._shortest = 0, float("inf")
            self.looking = False
            if self.whole:
                self._restart()
