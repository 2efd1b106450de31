"""Measures, once per process, up to which size shared memory beats reading the memory of the other rank.

The measurement runs when a process makes its first link within a host. One thread drives both ends of a link
of the process with itself, without waiting, and the minimum of several times counts. So it measures the cost
of system calls and copies on this machine (small caches, slow page look-up, a sandbox that intercepts system
calls), and hardly depends on the load: between two ranks on a busy machine, wake-up times would dominate.
It takes some 10 ms of a core. Each sender chooses on its own how it sends, so ranks need not agree.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from math import log
from typing import List, Optional, Sequence

import numpy as np

from ..wire.frames import HEADER_BYTES
from .base import LinkClosed
from .huge_pages import LEAST_BYTES
from .process_memory import RING_MOST_BYTES, Lease, PeerMemory, ReadingLink
from .ring import MASK, RING_BYTES, Ring

LENGTHS = tuple(kib * 1024 for kib in (256, 512, 1024, 2048, 4096))
_TRIES = 5
_ANOTHER_CORE_COSTS = 0.25
"""By how much (as a logarithm) shared memory must be faster: here one core copies into the ring and out of
it; between ranks another core does the second, and must get the bytes from the first one's cache."""
_BEYOND = 1.4
"""Shared memory is used up to this factor beyond the last size at which it was the faster one: half-way to
the next size that was measured."""

_lock = threading.Lock()
_found: Optional[int] = None


def measured() -> int:
    """Up to how many bytes shared memory is faster here; measured by the first call of a process."""
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
        # The first time that memory is touched, it costs more.
        sender.lend_above(MASK)
        _pass(sender, receiver, _buffer(RING_BYTES), _buffer(RING_BYTES))
        return _compare(sender, receiver)
    except LinkClosed:
        return RING_MOST_BYTES  # It may read others' memory, but not its own.
    finally:
        sender.close()
        receiver.close()


def _ends() -> List[ReadingLink]:
    """Both ends of a link of this process with itself.

    Raises:
        OSError: there is no shared memory.
    """
    ends = socket.socketpair()
    rings: List[Ring] = []
    try:
        for _ in range(2):
            rings.append(Ring.make())
            rings.append(rings[-1].twin())
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
    """Memory like that of a collective in which so much goes to one peer: large buffers lie on huge pages."""
    whole = np.ones(max(length, LEAST_BYTES if 2 * length >= LEAST_BYTES else 0), np.uint8)
    return whole[:length].data


def _compare(sender: ReadingLink, receiver: ReadingLink) -> int:
    """Up to how many bytes shared memory is the better one."""
    gains: List[float] = []
    for length in LENGTHS:
        source, target = _buffer(length), _buffer(length)
        best_s = [1.0, 1.0]
        for _ in range(1 + _TRIES):
            for number, ring_most_bytes in enumerate((MASK, 0)):
                sender.lend_above(ring_most_bytes)
                best_s[number] = min(best_s[number], _pass(sender, receiver, source, target))
        gains.append(log(best_s[1] / best_s[0]) - _ANOTHER_CORE_COSTS)
    cut = best_cut(gains)
    return int(LENGTHS[cut - 1] * _BEYOND) if cut else LENGTHS[0] // 2


def best_cut(gains: Sequence[float]) -> int:
    """How many of the sizes, from the smallest on, are better sent in the first of two ways.

    Args:
        gains: by how much the first is better at each size; negative where the second is.

    >>> best_cut([0.5, 0.2, -0.1, 0.05, -0.7])
    2
    """
    return max(range(len(gains) + 1), key=lambda cut: sum(gains[:cut]) - sum(gains[cut:]))


def _pass(sender: ReadingLink, receiver: ReadingLink, source: memoryview, target: memoryview) -> float:
    """Seconds that it takes to bring the bytes, and a header, from one end to the other."""
    began_s = time.perf_counter()
    out: Sequence[memoryview] = (memoryview(bytes(HEADER_BYTES)), source)
    into: Sequence[memoryview] = (memoryview(bytearray(HEADER_BYTES)), target)
    while out or into:
        if out:
            out = _after(out, sender.send(out))
        if into:
            into = _after(into, receiver.recv(into))
    return time.perf_counter() - began_s


def _after(views: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of the views behind the first so many bytes."""
    if count < views[0].nbytes:
        return (views[0][count:], *views[1:])
    return _after(views[1:], count - views[0].nbytes) if len(views) > 1 else ()
