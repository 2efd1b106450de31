"""The failure detector: which peers have sent no heartbeat for too long.

Every engine sends a heartbeat to every other one every few seconds. A process that is stopped, swapped
out, cut off, or inside a C call that keeps the interpreter lock does not. A process that computes, waits
or is in a debugger does: it is late, not failed.
"""

from __future__ import annotations

import math
from typing import Dict, Iterable, List, Optional, Tuple

BEATS = 6
"""Number of heartbeats in the time without any after which a peer counts as failed."""


class FailureDetector:
    """A pure state machine: arrivals and the time go in; failed peers and due heartbeats come out.

    A peer fails after ``dead_after_s`` without a heartbeat; 0: never. Times are in seconds.
    """

    def __init__(
        self, peers: Iterable[int], dead_after_s: float, now_s: float, interval_s: Optional[float] = None
    ) -> None:
        usual_s = dead_after_s / BEATS if dead_after_s else math.inf
        self.interval_s = usual_s if interval_s is None else interval_s
        self._dead_after_s = dead_after_s
        self._heard_s: Dict[int, float] = dict.fromkeys(peers, now_s)
        self._sent_s = now_s
        self._looked_s = now_s

    def received(self, peer: int, now_s: float) -> None:
        """A message or heartbeat has arrived from a peer."""
        if peer in self._heard_s:
            self._heard_s[peer] = now_s

    def left(self, peer: int) -> None:
        """The link to a peer has ended; no heartbeat is expected of it any more."""
        self._heard_s.pop(peer, None)

    def due(self, now_s: float) -> bool:
        """Return whether a heartbeat is due; if so, the caller sends it now."""
        if now_s - self._sent_s < self.interval_s:
            return False
        self._sent_s = now_s
        return True

    def silent(self, now_s: float) -> Optional[Tuple[int, float]]:
        """The peer without a heartbeat for longest, and that time in seconds, if that is too long."""
        if not self._dead_after_s:
            return None
        if now_s - self._looked_s > self._dead_after_s / 3:
            # This process did not run: heartbeats that arrived meanwhile are still in the sockets' buffers.
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._looked_s = now_s
        if not self._heard_s:
            return None
        peer, heard_s = min(self._heard_s.items(), key=lambda item: item[1])
        return (peer, now_s - heard_s) if now_s - heard_s >= self._dead_after_s else None

    def divided(self, now_s: float) -> Tuple[List[int], List[int]]:
        """(peers with a heartbeat within half the limit, peers without one)."""
        all_heard_s = dict(self._heard_s)  # a copy, because another thread may ask
        heard = {peer for peer, at_s in all_heard_s.items() if now_s - at_s <= self._dead_after_s / 2}
        return sorted(heard), sorted(set(all_heard_s) - heard)

    def alarm_s(self, now_s: float) -> float:
        """In how many seconds a heartbeat or the next check is due."""
        at_s = self._sent_s + self.interval_s
        if self._dead_after_s and self._heard_s:
            at_s = min(at_s, min(self._heard_s.values()) + self._dead_after_s)
        return max(0.0, min(at_s - now_s, self.interval_s))
