"""A ring of bytes in memory that two processes share: one end writes it, the other reads it.

In front of the bytes are words, each written by one end only: how much has been written, how much has been
read, and whether an end sleeps. So nothing but the wake-up of a sleeping end goes through the system.

Each end makes the ring for its outgoing bytes: anonymous memory, without a name in any file system, that it
passes to the other end through their Unix socket. When the processes end, however they end, the system frees
it. It is sealed, so that no process can shrink it: reading beyond its end kills a process (SIGBUS).
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from typing import Optional, Tuple

RING_BYTES = 8 * 1024 * 1024
"""More than a core's own cache holds; see :mod:`~ringcomm.transport.span`."""
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
    def make_largest(cls, size: int) -> Ring:
        """Make a ring of this size, or else of :data:`NEAR_BYTES`; OSError if there is no memory (left)."""
        try:
            return cls.make(size)
        except OSError:
            if size <= NEAR_BYTES:
                raise
            return cls.make(NEAR_BYTES)

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
    """Return a descriptor of anonymous memory; other processes get it only by receiving the descriptor."""
    if hasattr(os, "memfd_create"):
        try:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING  # type: ignore[attr-defined,unused-ignore]
            descriptor: int = os.memfd_create("ringcomm", flags)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            pass  # A sandbox may have the call but forbid it.
        else:
            import fcntl

            with suppress(OSError):  # Which systems cannot seal is asked where memory is received.
                fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK)
            return descriptor
    if not hasattr(os, "O_TMPFILE"):
        raise OSError("this system has no shared memory without a name")
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)


def send_descriptor(sock: socket.socket, message: bytes, descriptor: int) -> None:
    """Send one byte, and a descriptor with it, through a Unix socket."""
    sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])


def receive_memory(sock: socket.socket) -> Tuple[bytes, Optional[int]]:
    """Receive one byte, and the descriptor of mappable memory that came with it, if any."""
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
    if _may_be_mapped(descriptors[0]):
        return message, descriptors[0]
    os.close(descriptors[0])
    return message, None


def _may_be_mapped(descriptor: int) -> bool:
    """Return whether the memory cannot be shrunk, as far as this system can guarantee that."""
    if _is_sealed(descriptor):
        return True
    try:
        own = nameless()
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode) and not _is_sealed(own)
    finally:
        os.close(own)


def _is_sealed(descriptor: int) -> bool:
    import fcntl

    try:
        return bool(fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK)
    except OSError:
        return False  # No file of this kind has seals.
