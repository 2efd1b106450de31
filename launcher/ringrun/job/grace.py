"""Time limits for ranks to end without a signal, after the first failure and after the user's signal."""

from __future__ import annotations

from typing import Callable, Collection, Optional, Set

from ..diagnosis.first_failure import signal_name
from .agents import Steps
from .event_loop import Loop

GRACE_S = 2.0
"""Seconds after the first failure in which the other ranks can end with a typed error."""
LEAVING_S = 10.0
"""Further seconds for a rank that has left the job (frameworks are slow, and its exit code counts), and for
a starved rank, which may explain the failure as soon as it gets a processor.
"""


class Grace:
    """The time between the first failure of a job and its end, timed by the alarm ``grace``. `exited` grows
    as ranks end; `leaving` are ranks that have left the job, and perhaps failed, or that get no processor.
    """

    def __init__(self, loop: Loop, exited: Collection[int], end: Callable[[], None]) -> None:
        self.leaving: Set[int] = set()
        self._loop = loop
        self._exited = exited
        self._end = end
        self._waits = False

    def begin(self) -> bool:
        """Start the time after a failure; return whether it was not running yet."""
        if self._loop.is_set("grace"):
            return False
        self._loop.after("grace", GRACE_S, self._over)
        return True

    def _over(self) -> None:
        """End the job, but first let the rank that failed first end if it is about to."""
        if self.leaving - set(self._exited) and not self._waits:
            self._waits = True
            self._loop.after("grace", LEAVING_S, self._over)
        else:
            self._end()

    def exited(self) -> None:
        """Handle the end of a rank."""
        if self._waits and self._loop.is_set("grace") and not self.leaving - set(self._exited):
            self._loop.cancel("grace")
            self._end()


def killed_text(steps: Steps, at_once_s: Optional[float]) -> str:
    """Return the line about ranks that were killed after the user's signal; `steps` are the signals they
    should have got, `at_once_s` the time of the user's second signal in seconds after the first, or None.
    """
    (first, _), *_, (_, limit_s) = steps
    name = signal_name(first)
    if at_once_s is not None and at_once_s < limit_s:
        return f"killed by the second signal, {at_once_s:.1f} s after {name}, while handling it"
    advice = "; --grace S gives them longer" if name == "SIGTERM" else ""
    return f"killed {limit_s:g} s after {name}, while handling it{advice}"
