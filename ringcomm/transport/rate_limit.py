"""Rate limit for the work that unauthenticated peers cause: a token bucket."""

from __future__ import annotations

from ..clock import Clock, monotonic


class TokenBucket:
    """A token bucket: full at first, emptied by :meth:`spend`, refilled at a constant rate.

    Tokens are spent for work that is done already, so the number of tokens may become negative, but never
    less than ``-most``: after ``most / per_s`` seconds at most there are tokens again.

    Args:
        per_s: how many tokens are added per second.
        most: how many there are at most, and at first.
        clock: the source of time, in seconds.
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
        """How many tokens there are now; negative while more were spent than there were."""
        now_s = self._clock()
        self._left = min(self._most, self._left + self._per_s * (now_s - self._seen_s))
        self._seen_s = now_s
        return self._left
