"""The time for which a host or a slot is excluded after failures. Pure."""

from __future__ import annotations

from typing import Optional

NEVER = float("inf")
MAX_PAUSE_S = 30.0


class Cooldown:
    """The exclusion of one host or slot: the first lasts ``first_s`` seconds, the next ones 1, 2, 4, … up to
    30 s. After `quick_failures` consecutive failures to start the exclusion is permanent; None: no limit.
    """

    def __init__(self, first_s: float = 0.0, quick_failures: Optional[int] = None) -> None:
        self._first_s = first_s
        self._most_quick = NEVER if quick_failures is None else quick_failures
        self._failures = self._quick = 0
        self.until_s = 0.0

    def fail(self, now_s: float, was_member: bool) -> None:
        """Count a failure; that of a process that `was_member` of the job is not a failure to start."""
        self._quick = 0 if was_member else self._quick + 1
        if now_s < self.until_s:
            return  # a second failure within the exclusion does not lengthen it
        if self._quick >= self._most_quick:
            self.until_s = NEVER
        else:
            self.until_s = now_s + self._pause_s()
            self._failures += 1

    def _pause_s(self) -> float:
        return self._first_s if not self._failures else min(MAX_PAUSE_S, 2.0 ** (self._failures - 1))

    def succeed(self) -> None:
        """Reset the exclusions after a process has joined the job."""
        self.forgive()

    @property
    def has_failed(self) -> bool:
        """Whether there was a failure since the last success."""
        return self._failures > 0

    def forgive(self) -> None:
        """End the exclusion."""
        self.until_s, self._failures, self._quick = 0.0, 0, 0

    def excludes(self, now_s: float) -> bool:
        return now_s < self.until_s
