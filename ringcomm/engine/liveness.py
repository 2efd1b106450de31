"""Signs of life: who has been silent for too long.

Every engine says something every few seconds, even if it has nothing to say. A process that is
stopped, swapped out, cut off, or inside a C call that keeps the interpreter lock does not. A process
that computes, waits or sits in a debugger does: it is late, not dead.
"""

from __future__ import annotations

from typing import Dict, Iterable, Optional, Tuple

BEATS = 6
"""How many signs of life fit into the time after which silence means death."""


class Liveness:
    """Fed with what was heard and with the time; it says when to speak, and who is silent.

    Args:
        peers: who should be heard.
        dead_after_s: silence of this length means death; 0: never.
        now_s: the time.
    """

    def __init__(self, peers: Iterable[int], dead_after_s: float, now_s: float) -> None:
        self.interval_s = dead_after_s / BEATS if dead_after_s else 3600.0
        self._dead_after_s = dead_after_s
        self._heard_s: Dict[int, float] = dict.fromkeys(peers, now_s)
        self._spoken_s = now_s
        self._looked_s = now_s

    def heard(self, peer: int, now_s: float) -> None:
        """Something arrived from a peer."""
        if peer in self._heard_s:
            self._heard_s[peer] = now_s

    def left(self, peer: int) -> None:
        """A peer has hung up; nothing is expected of it any more."""
        self._heard_s.pop(peer, None)

    def due(self, now_s: float) -> bool:
        """Whether it is time to give a sign of life; if so, it is taken to have been given."""
        if not self._dead_after_s or now_s - self._spoken_s < self.interval_s:
            return False
        self._spoken_s = now_s
        return True

    def silent(self, now_s: float) -> Optional[Tuple[int, float]]:
        """A peer that has been silent for too long, and how long."""
        if not self._dead_after_s:
            return None
        if now_s - self._looked_s > 2 * self.interval_s:
            # It was this process that did not run: what others said meanwhile still lies in the system.
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._looked_s = now_s
        for peer, heard_s in self._heard_s.items():
            if now_s - heard_s >= self._dead_after_s:
                return peer, now_s - heard_s
        return None

    def alarm_s(self, now_s: float) -> float:
        """In how many seconds it is time to speak or to look again."""
        if not self._dead_after_s:
            return self.interval_s
        return max(0.0, min(self._spoken_s + self.interval_s - now_s, self.interval_s))
