"""Signs of life: who has been silent for too long.

Every engine says something to every other one every few seconds, even if it has nothing to say. A
process that is stopped, swapped out, cut off, or inside a C call that keeps the interpreter lock does
not. A process that computes, waits or sits in a debugger does: it is late, not dead.
"""

from __future__ import annotations

import math
from typing import Dict, Iterable, List, Optional, Tuple

BEATS = 6
"""How many heartbeats fit into the time after which silence means death."""


class Liveness:
    """Fed with what was heard and with the time; it says when to speak, and who is silent.

    Args:
        peers: who should be heard.
        dead_after_s: silence of this length means death; 0: never.
        now_s: the time.
        interval_s: how often to speak; None: ``BEATS`` times in ``dead_after_s``.
    """

    def __init__(
        self, peers: Iterable[int], dead_after_s: float, now_s: float, interval_s: Optional[float] = None
    ) -> None:
        usual_s = dead_after_s / BEATS if dead_after_s else math.inf
        self.interval_s = usual_s if interval_s is None else interval_s
        self._dead_after_s = dead_after_s
        self._heard_s: Dict[int, float] = dict.fromkeys(peers, now_s)
        self._spoken_s = now_s
        self._looked_s = now_s

    def received(self, peer: int, now_s: float) -> None:
        """Something arrived from a peer."""
        if peer in self._heard_s:
            self._heard_s[peer] = now_s

    def left(self, peer: int) -> None:
        """A peer has hung up; nothing is expected of it any more."""
        self._heard_s.pop(peer, None)

    def due(self, now_s: float) -> bool:
        """Whether it is time to give a heartbeat; if so, it is taken to have been given."""
        if now_s - self._spoken_s < self.interval_s:
            return False
        self._spoken_s = now_s
        return True

    def silent(self, now_s: float) -> Optional[Tuple[int, float]]:
        """The peer that has been silent for longest, if that is too long, and how long."""
        if not self._dead_after_s:
            return None
        if now_s - self._looked_s > self._dead_after_s / 3:
            # It was this process that did not run: what others said meanwhile still lies in the system.
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._looked_s = now_s
        if not self._heard_s:
            return None
        peer, heard_s = min(self._heard_s.items(), key=lambda item: item[1])
        return (peer, now_s - heard_s) if now_s - heard_s >= self._dead_after_s else None

    def divided(self, now_s: float) -> Tuple[List[int], List[int]]:
        """(who was heard lately, who was not): silence of half the limit is enough to be among the second."""
        all_heard_s = dict(self._heard_s)  # a copy, because another thread may ask
        heard = {peer for peer, at_s in all_heard_s.items() if now_s - at_s <= self._dead_after_s / 2}
        return sorted(heard), sorted(set(all_heard_s) - heard)

    def alarm_s(self, now_s: float) -> float:
        """In how many seconds it is time to speak or to look again."""
        at_s = self._spoken_s + self.interval_s
        if self._dead_after_s and self._heard_s:
            at_s = min(at_s, min(self._heard_s.values()) + self._dead_after_s)
        return max(0.0, min(at_s - now_s, self.interval_s))
