"""Links through memory that two processes share, where they may not read each other's own.

Each end makes a ring for what it sends: a piece of anonymous memory, without a name in any file
system, that it hands to the other end through their Unix socket. The sender copies bytes into the
ring and sends a frame with their position; the receiver copies them out, and acknowledges once it has read
a good part of the ring, so that there is room again.

No position lies in shared memory. Where bytes are, and that they may be overwritten, is only sent
in frames, through the socket. So a process never sees a position before the bytes that it refers to, on
processors that reorder stores either: what is stored before a message is sent can be loaded after
it was received, because the system's queue in between is guarded by locks.

When the processes end, however they end, the system frees the memory.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
from typing import List, Optional, Tuple

from .base import LinkClosed, Views
from .framed import OFFER, ONLY_RING, SHORT_BYTES, Carriers, FramedLink, head
from .views import flat

RING_BYTES = 1024 * 1024
"""Large enough to keep both ends busy, small enough to stay in a processor's cache."""
_PIECE_BYTES = RING_BYTES // 4
"""The sender sends a frame after this many bytes, so that both ends copy at the same time."""


class Ring:
    """Shared memory of :data:`RING_BYTES` bytes, one end writing, the other reading.

    Args:
        descriptor: of the memory. It is closed as soon as it is not needed, or here if mapping fails.

    Raises:
        OSError: it cannot be mapped, or is too small.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        try:
            self._map = mmap.mmap(descriptor, RING_BYTES)
        except (OSError, ValueError) as problem:
            os.close(descriptor)
            raise OSError(f"cannot map shared memory: {problem}") from None
        self.bytes = memoryview(self._map)

    @classmethod
    def make(cls) -> Ring:
        """Fresh memory.

        Raises:
            OSError: this system has none, or has none left.
        """
        descriptor = _nameless()
        try:
            # All of it now: what is missing later would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, RING_BYTES)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def pass_on(self, sock: socket.socket, message: bytes) -> None:
        """Send one byte, and the memory with it, through a Unix socket.

        Raises:
            OSError: the connection broke.
        """
        passed = array.array("i", [self._descriptor])
        sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
        self._close_descriptor()

    @classmethod
    def take(cls, sock: socket.socket) -> Tuple[bytes, Optional[Ring]]:
        """Receive one byte, and the memory that came with it, if any did that can be used.

        Raises:
            OSError: the connection broke.
        """
        descriptors = array.array("i")
        room = socket.CMSG_SPACE(descriptors.itemsize)
        message, extras, _, _ = sock.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
        if not message:
            raise ConnectionError("it closed the connection")
        try:
            ring = cls(descriptors[0]) if descriptors else None
        except OSError:
            return message, None
        if ring is not None:
            ring._close_descriptor()
        return message, ring

    def twin(self) -> Ring:
        """The same memory once more, for another end in this process.

        Raises:
            OSError: it cannot be mapped.
        """
        return Ring(os.dup(self._descriptor))

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        """Let go of it. Closing again is harmless."""
        self._close_descriptor()
        self.bytes.release()
        self._map.close()


def _nameless() -> int:
    """A descriptor of anonymous memory, which other processes can only get by its being passed to them."""
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("ringcomm", os.MFD_CLOEXEC)
        except OSError:
            pass  # A sandbox may have the call but forbid it.
    if not hasattr(os, "O_TMPFILE"):
        raise OSError("this system has no shared memory without a name")
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)


class SharedLink(FramedLink):
    """A link to a rank of the same host through two rings of shared memory, which it owns from now on.

    A place is a position in the sender's ring. Bytes are taken as soon as they are in the ring, or in
    the socket.

    Args:
        outward, inward: the rings, for what this end sends and receives.
    """

    __slots__ = ("_inward", "_outward", "_room", "_write_at")

    carrier = "shared memory"

    def __init__(
        self, peer: int, sock: socket.socket, outward: Optional[Ring], inward: Optional[Ring]
    ) -> None:
        super().__init__(peer, sock)
        self._outward = outward
        self._inward = inward
        self._room = RING_BYTES if outward is not None else 0  # in our ring
        self._write_at = 0

    def ways(self) -> List[Carriers]:
        """The socket and, if there is shared memory, the ring."""
        return [*super().ways(), ONLY_RING] if self._outward is not None else super().ways()

    def send(self, views: Views) -> int:
        if self._owed:
            return self._send_owed(views)
        if not self._unsent and not self._lent:
            length = 0
            for view in views:
                length += view.nbytes
            if 0 < length <= self._inline_most:
                return self._send_inline(views, length)
        return self._send_large(views)

    def _send_large(self, views: Views) -> int:
        """Send what does not go through the socket, or not now; how many bytes were taken."""
        if self._room < _PIECE_BYTES and self._outward is not None and not self._answers[OFFER]:
            self._pump()
        self._make_room()
        if self._unsent and not self._flush():
            return 0
        return self._post(views)

    def _make_room(self) -> None:
        """Use the part of the ring again that the peer has emptied."""
        if self._answers[OFFER]:
            self._room += self._answers[OFFER]
            self._answers[OFFER] = 0
            if self._room > RING_BYTES or self._outward is None:
                raise LinkClosed(self.peer, "it claims to have read more than it was offered")
            if self._room == RING_BYTES:
                self._write_at = 0  # where it was written last: that is in the cache

    def _post(self, views: Views) -> int:
        """Copy the front of the views into the ring, in one piece; how many bytes were taken."""
        place, taken = self._write_at, 0
        for view in views:
            count = self._put(flat(view))
            taken += count
            if count < view.nbytes or count > SHORT_BYTES or self._write_at < place:
                break
        if taken:
            self._write([head(OFFER, taken, place)])
        return taken

    def _put(self, data: memoryview) -> int:
        """Copy a piece of the data into the ring; how many bytes."""
        place = self._write_at
        count = min(data.nbytes, self._room, _PIECE_BYTES, RING_BYTES - place)
        if count and self._outward is not None:
            self._outward.bytes[place : place + count] = data[:count]
            self._write_at = (place + count) % RING_BYTES
            self._room -= count
        return count

    def _fetch(self, kind: int, place: int, view: memoryview) -> int:
        if kind != OFFER or self._inward is None:
            raise LinkClosed(self.peer, "it offered bytes in memory that is not shared")
        if place + view.nbytes > RING_BYTES:
            raise LinkClosed(self.peer, "it offered bytes beyond the memory that is shared")
        view[:] = self._inward.bytes[place : place + view.nbytes]
        return view.nbytes

    def _waits_for_answer(self) -> bool:
        return not self._room and not self._answers[OFFER]

    def close(self) -> None:
        self._room = 0
        super().close()
        for ring in (self._outward, self._inward):
            if ring is not None:
                ring.close()
