"""How much may be done for strangers in a while: tokens that are spent on them and come back with time."""

from __future__ import annotations

from ..clock import Clock, monotonic


class Allowance:
    """A bucket of tokens: full at first, emptied by :meth:`spend`, filled by time alone.

    What is spent has been done already, so it is taken out even if that leaves fewer than none; but never
    less than ``-most``. So nobody waits longer than ``most / per_s`` seconds for there to be any again.

    Args:
        per_s: how many tokens come back in a second.
        most: how many there are at most, and at first.
    """

    __slots__ = ("_clock", "_left", "_most", "_per_s", "_seen_s")

    def __init__(self, per_s: float, most: float, clock: Clock = monotonic) -> None:
        self._per_s = per_s
        self._most = most
        self._clock = clock
        self._left = most
        self._seen_s = clock()

    def spend(self, tokens: float) -> None:
        """Take tokens out."""
        self._left = max(-self._most, self.left - tokens)

    @property
    def left(self) -> float:
        """How many tokens there are now; negative while more was spent than there was."""
        now_s = self._clock()
        self._left = min(self._most, self._left + self._per_s * (now_s - self._seen_s))
        self._seen_s = now_s
        return self._left
