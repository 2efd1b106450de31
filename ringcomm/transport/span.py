"""Decides how much of its ring a sender uses, from how long its copies into the ring take.

Between cores that share a cache a small part of the ring is best: it stays in the cache. Between cores that
share none it is expensive to write lines that the other core still has in its cache from reading them: on two
processors of a virtual machine 225 us for 512 KiB, where a shared cache needs 55. A core's cache evicts lines
as it reads more. So there the sender uses all of a ring that is larger than such a cache, and writing costs
less than half. On a virtual machine the state changes within seconds, so the small part is tried again and
again.
"""

from __future__ import annotations

import time
from typing import Optional

import numpy as np

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
