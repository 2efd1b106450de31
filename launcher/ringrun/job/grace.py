"""How long ranks have to end by themselves, after the first failure and after the user's signal."""

from __future__ import annotations

from typing import Callable, Collection, Optional, Set

from ..diagnosis.first_failure import signal_name
from .agents import Steps
from .event_loop import Loop

GRACE_S = 2.0
"""After the first failure the others have this long to end by themselves, with a typed error."""
LEAVING_S = 10.0
"""One that has said goodbye has this much longer: frameworks take their time, and its exit code counts.

One that gets no processor has it, too: it may explain the failure as soon as it gets one.
"""


class Grace:
    """The time between the first failure of a job and its end.

    Args:
        loop: has the alarm ``grace``.
        exited: the ranks that have ended; it grows.
        end: ends the job.

    Attributes:
        leaving: ranks that said goodbye, and perhaps failed, or that get no processor.
    """

    def __init__(self, loop: Loop, exited: Collection[int], end: Callable[[], None]) -> None:
        self.leaving: Set[int] = set()
        self._loop = loop
        self._exited = exited
        self._end = end
        self._waits = False

    def begin(self) -> bool:
        """The job has failed; whether the time begins now."""
        if self._loop.is_set("grace"):
            return False
        self._loop.after("grace", GRACE_S, self._over)
        return True

    def _over(self) -> None:
        """End the job, but let the rank that failed first end by itself if it is about to."""
        if self.leaving - set(self._exited) and not self._waits:
            self._waits = True
            self._loop.after("grace", LEAVING_S, self._over)
        else:
            self._end()

    def exited(self) -> None:
        """A rank has ended."""
        if self._waits and self._loop.is_set("grace") and not self.leaving - set(self._exited):
            self._loop.cancel("grace")
            self._end()


def killed_text(steps: Steps, at_once_s: Optional[float]) -> str:
    """The line about ranks that the user has ended and that were killed.

    Args:
        steps: the signals that they should have got.
        at_once_s: when the user's second signal came, in seconds after the first; None without one.
    """
    (first, _), *_, (_, limit_s) = steps
    name = signal_name(first)
    if at_once_s is not None and at_once_s < limit_s:
        return f"killed by the second signal, {at_once_s:.1f} s after {name}, while handling it"
    advice = "; --grace S gives them longer" if name == "SIGTERM" else ""
    return f"killed {limit_s:g} s after {name}, while handling it{advice}"
