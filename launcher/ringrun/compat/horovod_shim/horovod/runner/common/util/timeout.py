"""A time limit with a message."""

from __future__ import annotations

import time


class TimeoutException(Exception):  # noqa: N818  Horovod's name
    """The time limit has passed."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class Timeout:
    """A time limit.

    Args:
        timeout: the limit in seconds from now.
        message: the error's text, with ``{activity}``.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout, self._message = timeout, message
        self._timeout_at = time.time() + timeout

    def remaining(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._timeout_at - time.time())

    def timed_out(self) -> bool:
        """Return whether the limit has passed."""
        return time.time() > self._timeout_at

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException if the limit has passed.

        Args:
            activity: what is being waited for.

        Raises:
            TimeoutException: the limit has passed.
        """
        if self.timed_out():
            text = self._message.format(activity=activity)
            full_stop = "" if self._message.rstrip().endswith(".") else "."
            raise TimeoutException(f"{text}{full_stop} Timeout after {self._timeout} seconds.")
