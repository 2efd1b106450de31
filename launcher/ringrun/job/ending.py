"""How a job ends: the signals of its ranks, the time after the first failure, and the signals of the user."""

from __future__ import annotations

import signal
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from ..diagnosis.first_failure import Exit, signal_name
from .event_loop import Loop

Steps = Sequence[Tuple[int, float]]
"""How to end ranks: (signal, seconds from now)."""
END: Steps = ((15, 0.0), (9, 1.5))
INTERRUPT: Steps = ((2, 0.0), (15, 2.0), (9, 3.5))
KILL: Steps = ((9, 0.0),)
GRACE_S = 2.0
"""Seconds after the first failure in which the other ranks can end with a typed error."""
LEAVING_S = 10.0
"""Further seconds for a rank that has left the job (frameworks are slow, and its exit code counts), and for
a starved rank, which may explain the failure as soon as it gets a processor.
"""
SAME_S = 1.0
"""A second signal within this time is the same request, unless it is Ctrl-C: ``timeout`` sends it to a
process and to its group, and systemd SIGHUP after SIGTERM."""


def term(grace_s: float) -> Steps:
    """Return the steps after SIGTERM from outside."""
    return ((15, 0.0), (9, grace_s))


class Ending:
    """Why and how a job ends. `stop` has every agent end its ranks by steps; `exits` grows as ranks end."""

    def __init__(self, loop: Loop, exits: Mapping[int, Exit], stop: Callable[[Steps], None]) -> None:
        self.reason = ""  # start, failure, interrupt, pipe or abandoned; "" unless the launcher ends the job
        self.signum = 0  # the user's first signal
        self.leaving: Set[int] = set()  # ranks that have left, and perhaps failed, or that get no processor
        self._loop, self._exits, self._stop = loop, exits, stop
        self._waits_longer = False
        self._signalled_s = self._at_once_s = 0.0  # when the user's first and second signal came
        self._asked: Dict[int, Steps] = {}  # by rank that the user ends

    def begin(self, reason: str, steps: Steps = END) -> None:
        """Have every agent end its ranks by these steps and exit; the first reason counts."""
        self.reason = self.reason or reason
        self._loop.cancel("start", "gather", "grace")
        self._stop(steps)
        self._loop.wake()  # all links may have ended already

    # -- after the first failure ---------------------------------------------------------------

    def after_failure(self) -> bool:
        """Give the other ranks time to end; return False if they have it already."""
        if self._loop.is_set("grace"):
            return False
        self._loop.after("grace", GRACE_S, self._over)
        return True

    def _over(self) -> None:
        # The rank that failed first may be about to end.
        if self.leaving - set(self._exits) and not self._waits_longer:
            self._waits_longer = True
            self._loop.after("grace", LEAVING_S, self._over)
        else:
            self.begin("failure")

    def exited(self) -> None:
        """Handle the end of a rank."""
        if self._waits_longer and self._loop.is_set("grace") and not self.leaving - set(self._exits):
            self.begin("failure")

    # -- signals of the user -------------------------------------------------------------------

    def signalled(self, signum: int, grace_s: float, ranks: Iterable[int], has_failed: bool) -> str:
        """End the job: in order at the first signal, at once at the second. Return a line to show, or ""."""
        now_s = self._loop.clock()
        if self.signum and signum != signal.SIGINT and now_s - self._signalled_s < SAME_S:
            return ""
        if self.reason == "interrupt" or (self.reason and self.signum):
            self._at_once_s = self._at_once_s or now_s
            self.begin(self.reason, KILL)
            return ""
        self.signum, self._signalled_s = signum, now_s
        if has_failed or self.reason:
            self.begin("failure")
            return ""
        steps, limit = INTERRUPT, ""
        if signum != signal.SIGINT:
            steps, limit = term(grace_s), f"; they have {grace_s:g} s (--grace)"
        for rank in ranks:
            self.ask(rank, steps)
        self.begin("interrupt", steps)
        return f"{signal_name(signum)}: ending all ranks on all hosts (once more: at once){limit}"

    def ask(self, rank: int, steps: Steps) -> None:
        """Note that the user ends a rank by these steps."""
        self._asked[rank] = steps

    def killed(self) -> Dict[str, List[int]]:
        """Return the ranks that did not end in time since the last call, by the text about them."""
        found: Dict[str, List[int]] = {}
        at_once_s = self._at_once_s - self._signalled_s if self._at_once_s else None
        for rank in sorted(self._asked.keys() & self._exits.keys()):
            steps, end = self._asked.pop(rank), self._exits[rank]
            if end.signal == end.sent == signal.SIGKILL:
                found.setdefault(killed_text(steps, at_once_s), []).append(rank)
        return found


def killed_text(steps: Steps, at_once_s: Optional[float]) -> str:
    """Return the text about ranks that were killed while they handled the first signal of `steps`; the user's
    second signal came `at_once_s` seconds after the first, or not.
    """
    (first, _), *_, (_, limit_s) = steps
    name = signal_name(first)
    if at_once_s is not None and at_once_s < limit_s:
        return f"killed by the second signal, {at_once_s:.1f} s after {name}, while handling it"
    advice = "; --grace S gives them longer" if name == "SIGTERM" else ""
    return f"killed {limit_s:g} s after {name}, while handling it{advice}"
