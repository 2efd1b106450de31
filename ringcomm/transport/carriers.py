"""Measures, once per process, up to which size shared memory beats reading the memory of the other rank.

Two carriers take bytes between ranks of one host that may read each other's memory (:class:`ReadingLink`):
the *ring*, shared memory that the sender copies into and the receiver copies out of; and *lending*: the
sender passes only the address of its buffer, and the receiver reads it (``process_vm_readv``). The link
chooses one for each view by its length; see :meth:`ReadingLink.lend_above`.

The measurement runs when :func:`~.local.make_links` makes the first such link of a process. One thread drives
both ends of a link of the process with itself, without waiting, and the minimum of several times counts. So
it measures the cost of system calls and copies on this machine (small caches, slow page look-up, a sandbox
that intercepts system calls), and hardly depends on the load. It takes some 30 ms of a core. Each sender
chooses alone how it sends, so ranks need not agree.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from math import log
from typing import List, Optional, Sequence, Tuple, Union

import numpy as np

from ..wire.frames import HEADER_BYTES
from .base import LinkClosed, after
from .huge_pages import MIN_BYTES
from .process_memory import RING_MOST_BYTES, Lease, PeerMemory, ReadingLink
from .ring import MASK, NEAR_BYTES, Ring
from .shm import PIECE_BYTES

LENGTHS = tuple(kib * 1024 for kib in (256, 512, 1024, 2048, 4096, 8192))
"""Measured lengths in bytes, one octave apart."""
_TRIES = 4
_MAX_S = 0.1
"""After this time larger sizes are not measured: a small board needs it for the smaller ones."""
_ANOTHER_CORE_COSTS = 0.37
"""By how much (as a logarithm) shared memory must be faster: here one core copies into and out of the ring;
between ranks another core reads, and must get the lines from the first one's cache. Two ranks on two cores of
an AMD EPYC were equally fast with 5 MB each way, where this measures this difference."""
_lock = threading.Lock()
_found: Optional[int] = None


def measured() -> int:
    """Return the greatest length of a view, in bytes, that goes through the ring: 128 KiB (nothing measured
    is faster there) to 16 MiB. Only the first call measures; :data:`~.process_memory.RING_MOST_BYTES` if
    nothing can be compared.
    """
    global _found
    with _lock:
        if _found is None:
            _found = _measure()
        return _found


def _measure() -> int:
    try:
        sender, receiver = _ends()
    except OSError:
        return RING_MOST_BYTES  # No memory to share: nothing can be compared.
    try:
        # The first time that memory is touched, it costs more. (Above MASK: nothing is lent; above 0: all.)
        sender.lend_above(MASK)
        _pass(sender, receiver, _buffer(NEAR_BYTES), _Overwriting(_buffer(NEAR_BYTES)))
        return _compare(sender, receiver)
    except LinkClosed:
        return RING_MOST_BYTES  # It may read others' memory, but not its own.
    finally:
        sender.close()
        receiver.close()


def _ends() -> List[ReadingLink]:
    """Return both ends of a link of this process with itself; raises OSError without shared memory."""
    ends = socket.socketpair()
    rings: List[Ring] = []
    try:
        for _ in range(2):
            rings.append(Ring.make(NEAR_BYTES))
            rings.append(rings[-1].duplicate())
        leases = [Lease(), Lease()]
        memory = [PeerMemory(os.getpid(), lease.address, lease.token) for lease in leases]
        return [
            ReadingLink(1 - number, ends[number], memory[1 - number], leases[number], *pair)
            for number, pair in enumerate(((rings[0], rings[3]), (rings[2], rings[1])))
        ]
    except OSError:
        for ring in rings:
            ring.close()
        for sock in ends:
            sock.close()
        raise


def _buffer(length: int) -> memoryview:
    """Return memory like that of a collective that sends this much to a peer, on huge pages if large."""
    whole = np.ones(max(length, MIN_BYTES if 2 * length >= MIN_BYTES else 0) // 4, np.float32)
    return whole.view(np.uint8)[:length].data


def _compare(sender: ReadingLink, receiver: ReadingLink) -> int:
    """Return the size up to which shared memory is better for an all-reduce (half adding, half copying)."""
    gains: List[float] = []
    until_s = time.perf_counter() + _MAX_S
    for length in LENGTHS:
        if len(gains) > 2 and time.perf_counter() > until_s:
            break
        source, target = _buffer(length), _buffer(length)
        takers: Tuple[_Taker, ...] = (_Overwriting(target), _Adding(target))
        best_s = np.ones((2, len(takers)))
        for _ in range(1 + _TRIES):
            for number, ring_most_bytes in enumerate((MASK, 0)):
                sender.lend_above(ring_most_bytes)
                for half, taker in enumerate(takers):
                    taken_s = _pass(sender, receiver, source, taker)
                    best_s[number, half] = min(best_s[number, half], taken_s)
        through_ring_s, lent_s = best_s.sum(axis=1)
        gains.append(log(lent_s / through_ring_s) - _ANOTHER_CORE_COSTS)
    return int(LENGTHS[0] * 2.0 ** crossing(gains))


def crossing(gains: Sequence[float]) -> float:
    """Return where the regression line through the gains at 0, 1, 2, ... octaves crosses zero, in octaves
    from -1 (always a loss) to ``len(gains)`` (always a gain).

    >>> round(crossing([0.5, 0.3, 0.1, -0.1]), 3)
    2.5
    """
    slope, first = np.polyfit(range(len(gains)), gains, 1)
    if slope >= 0.0:
        return float(len(gains)) if sum(gains) > 0.0 else -1.0
    return float(min(max(-first / slope, -1.0), len(gains)))


class _Overwriting:
    """A receiver that overwrites its own bytes with those of the other end."""

    def __init__(self, target: memoryview) -> None:
        self._target = target
        self.begin()

    def begin(self) -> None:
        """Prepare for the next message."""
        self._into: Sequence[memoryview] = (memoryview(bytearray(HEADER_BYTES)), self._target)

    def take(self, receiver: ReadingLink) -> int:
        """Receive available bytes; return how many."""
        count = receiver.recv(self._into)
        self._into = after(self._into, count)
        return count


class _Adding:
    """A receiver that adds the numbers of the other end to its own: in the ring, or from a segment."""

    def __init__(self, target: memoryview) -> None:
        self._sum = np.frombuffer(target, np.float32)
        self._segment = np.empty(ReadingLink.segment_bytes, np.uint8)
        self.begin()

    def begin(self) -> None:
        """Prepare for the next message."""
        self._header: Sequence[memoryview] = (memoryview(bytearray(HEADER_BYTES)),)
        self._added = 0  # bytes of the numbers
        self._waiting = 0  # bytes in the segment that are not added yet

    def take(self, receiver: ReadingLink) -> int:
        """Receive available bytes; return how many."""
        if self._header:
            count = receiver.recv(self._header)
            self._header = after(self._header, count)
            return count
        left = self._sum.nbytes - self._added
        if not self._waiting:
            piece = receiver.peek(min(left, PIECE_BYTES), self._sum.itemsize)
            if piece is not None:
                self._add(piece)
                receiver.skip(piece.nbytes)
                return piece.nbytes
        wanted = min(left, self._segment.nbytes)
        count = receiver.recv((self._segment[self._waiting : wanted].data,))
        self._waiting += count
        if self._waiting == wanted:
            self._add(self._segment[:wanted].data)
            self._waiting = 0
        return count

    def _add(self, piece: memoryview) -> None:
        low = self._added // self._sum.itemsize
        self._added += piece.nbytes
        mine = self._sum[low : self._added // self._sum.itemsize]
        np.add(mine, np.frombuffer(piece, self._sum.dtype), out=mine)


_Taker = Union[_Overwriting, _Adding]


def _pass(sender: ReadingLink, receiver: ReadingLink, source: memoryview, taker: _Taker) -> float:
    """Return the seconds that the bytes and a header take from one end to the other."""
    began_s = time.perf_counter()
    taker.begin()
    out: Sequence[memoryview] = (memoryview(bytes(HEADER_BYTES)), source)
    left = HEADER_BYTES + source.nbytes
    while left:
        if out:
            out = after(out, sender.send(out))
        left -= taker.take(receiver)
    while out:
        out = after(out, sender.send(out))  # lent bytes are taken once they have been returned
    return time.perf_counter() - began_s
