"""Estimates the speed of a wire from the bytes received over time: pure, so that every case can be a test.

Shapers and access points let a burst pass at full speed (a token bucket: up to a megabyte) before their limit
shows. So only later bytes count, by the clock of the receiving side: a sender only sees its own buffers fill.
Only a fast wire looks fast, while a busy machine makes it look slow for moments; so the best of several
windows counts, and the counters of the sender's system (Linux): its acknowledgements come at the speed of the
wire even while neither program runs.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

BURST_BYTES = 1088 * 1024
"""Bytes that a bucket of 1 MiB lets pass, and some more: it is refilled meanwhile."""
TAIL_BYTES = 2 * 1024 * 1024
"""After the burst, a fast wire is measured over this many bytes more;"""
TAIL_S = 0.06
"""a slow one is measured for this long."""
LIMIT_BYTES = BURST_BYTES + TAIL_BYTES
"""More is never sent in one measurement, each way."""
LIMIT_S = 0.35
"""A measurement takes no longer if enough is known of one wire,"""
MAX_S = 0.7
"""and no longer than this in any case: on a busy machine nothing may be known by then."""
MIN_S = 0.05
"""A wire is called slow after this time at the earliest."""
CLEARLY_SLOWER = 8.0
"""A wire this many times slower than another one, burst included, need not continue."""
_WINDOW_BYTES = 256 * 1024
_WINDOW_S = 0.02
_PACKET_BYTES = 64 * 1024
"""Within a machine, and from a shaper, segments arrive in pieces of this size."""
_MIN_ACKED_BYTES = 128 * 1024
_TICK_S = 0.004
"""Systems count the active time of a connection in such steps."""


class Meter:
    """One direction of a wire. Times are seconds of one clock, counts are bytes since the start."""

    def __init__(self, start_s: float) -> None:
        self._points: List[Tuple[float, int]] = [(start_s, 0)]
        self._tail: Optional[int] = None  # index of the first point behind the burst
        self._told = 0.0  # what the sender's system said last
        self._told_behind = 0.0  # and at best, behind the burst
        self._first_behind: Optional[Tuple[int, int]] = None  # acknowledged bytes and active time there

    def arrived(self, now_s: float, total: int) -> None:
        """Note the bytes received by now; all earlier ones must have been reported before."""
        self._points.append((max(now_s, self._points[-1][0]), total))
        if self._tail is None and total >= BURST_BYTES:
            self._tail = len(self._points) - 1

    def told(self, acked_bytes: int, active_us: int, rate: float) -> None:
        """Take the counters of the sender's system: acknowledged bytes, microseconds in which bytes were in
        flight that the receiver had room for, and the last rate in bytes per second.

        The rate may be an old one if the sender was kept from running, and the time may be too short if the
        receiver was; so the lower of both counts.
        """
        self._told = rate
        if acked_bytes < BURST_BYTES:
            return
        if self._first_behind is None:
            self._first_behind = acked_bytes, active_us
        acked_bytes -= self._first_behind[0]
        active_us -= self._first_behind[1]
        if acked_bytes >= _MIN_ACKED_BYTES:
            behind = acked_bytes / max(active_us * 1e-6, _TICK_S)
            self._told_behind = max(self._told_behind, min(rate, behind))

    def done(self, now_s: float) -> bool:
        """Return whether enough is known."""
        if self._tail is None:
            return False
        since_s, before = self._points[self._tail]
        total = self._points[-1][1]
        return total >= LIMIT_BYTES or total - before >= TAIL_BYTES or now_s - since_s >= TAIL_S

    def at_most(self, now_s: float) -> float:
        """Return an upper bound on its sustained speed, in bytes per second: a burst can only make the
        beginning faster, unless the sender's system counted more: then processors may make it slow.
        """
        return max(self._told, self._points[-1][1] / max(now_s - self._points[0][0], 1e-6))

    def rate(self, now_s: float) -> float:
        """Return its sustained speed, in bytes per second, as far as it is known."""
        if self._tail is not None:
            return max(self._best_window(now_s), self._at_least(), self._told_behind)
        half_s = (self._points[0][0] + now_s) / 2  # what comes until then may be a burst
        from_s, before = max(point for point in self._points if point[0] <= half_s)
        total = self._points[-1][1]
        # If nothing has arrived, one packet may be in flight all the time: a slow wire is not dead.
        return max(total - before, min(total, _PACKET_BYTES)) / max(now_s - from_s, 1e-6)

    def _at_least(self) -> float:
        """Return a lower bound despite any burst: the bytes beyond one, over the time of all. For a receiver
        that was kept from running, and found many bytes when it was back.
        """
        at_s, total = self._points[-1]
        return max(0, total - BURST_BYTES) / max(at_s - self._points[0][0], 1e-6)

    def _best_window(self, now_s: float) -> float:
        """Return the best rate of the parts that are long enough to count."""
        best = 0.0
        assert self._tail is not None
        from_s, before = self._points[self._tail]
        for at_s, total in [*self._points[self._tail + 1 :], (now_s, self._points[-1][1])]:
            if total - before >= _WINDOW_BYTES or at_s - from_s >= _WINDOW_S:
                best = max(best, (total - before) / max(at_s - from_s, 1e-6))
                from_s, before = at_s, total
        return best


class Lap(NamedTuple):
    """Both directions of one wire."""

    there: Meter
    back: Meter

    def done(self, now_s: float) -> bool:
        """Return whether enough is known about both."""
        return self.there.done(now_s) and self.back.done(now_s)

    def rate(self, now_s: float) -> float:
        """Return the rate of the slower direction, in bytes per second."""
        return min(self.there.rate(now_s), self.back.rate(now_s))

    def at_most(self, now_s: float) -> float:
        """Return an upper bound on that."""
        return min(self.there.at_most(now_s), self.back.at_most(now_s))


def is_over(laps: Sequence[Lap], elapsed_s: float, now_s: float) -> bool:
    """Return whether a simultaneous measurement of several wires has shown which of them are fast."""
    going = [lap for lap in laps if not lap.done(now_s)]
    if not going or elapsed_s >= (LIMIT_S if len(going) < len(laps) else MAX_S):
        return True
    if len(going) == len(laps) or elapsed_s < MIN_S:
        return False
    best = max(lap.rate(now_s) for lap in laps if lap.done(now_s))
    return all(CLEARLY_SLOWER * lap.at_most(now_s) <= best for lap in going)
