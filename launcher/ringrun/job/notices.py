"""What the rendezvous says of a running job, apart from failures: warnings, refusals, waiting times."""

from __future__ import annotations

from typing import Dict, Set

from ringcomm.balance.replan import rank_names
from ringcomm.balance.unequal import Usage, job_line

from ..plan.job import Job
from ..show.printer import Printer
from .outcome import Outcome
from .rendezvous import NoticeLike

REFUSALS_SHOWN = 20
_NO_PREDICTION = (
    "No prediction: the program ended without one. It must call init() of ringcomm or of an adapter, and "
    "reduce its gradients with them in 13 equal steps (see docs/scaling.md)."
)
_NO_ADVICE = (
    "No advice: the program ended without it. It must call init() of ringcomm or of an adapter, and take its "
    "data from balanced batches (see docs/unequal.md)."
)


class Notices:
    """Shows what is for the user, and keeps what the ranks report at their end.

    Args:
        job: what the notices are about.
        printer: shows them.
    """

    def __init__(self, job: Job, printer: Printer) -> None:
        self._job = job
        self._printer = printer
        self._refusals = 0
        self._usages: Dict[int, Usage] = {}
        self._topics: Set[str] = set()

    def take(self, notice: NoticeLike) -> None:
        """The rendezvous has sent a notice."""
        if notice.kind == "usage" and notice.rank is not None:
            self._usages[notice.rank] = Usage(**notice.detail)
            return
        if notice.kind == "refused":
            self._refusals += 1
            if self._refusals <= REFUSALS_SHOWN:
                more = " (further ones are not shown)" if self._refusals == REFUSALS_SHOWN else ""
                self._printer.show(f"refused: {notice.text}{more}")
            return
        if notice.kind == "warning":
            self._topics.add(str(notice.detail.get("topic", "")))
        if notice.kind == "warning" or (self._job.settings.verbose and notice.text):
            self._printer.show(notice.text)

    def conclude(self, outcome: Outcome) -> None:
        """All ranks have ended well: show what that says, and have a job fail that has not measured.

        Args:
            outcome: gets exit code 1 if a prediction or advice was asked for, and there is none.
        """
        self._printer.note(self.unequal())
        settings = self._job.settings
        for asked, topic, missing, text in (
            (settings.predict, "predict", "no prediction", _NO_PREDICTION),
            (settings.advise, "advise", "no advice", _NO_ADVICE),
        ):
            if asked and topic not in self._topics:
                outcome.exit_code = 1
                if missing not in self._topics:
                    self._printer.show(text)

    def unequal(self) -> str:
        """Which rank waited for which, and what that cost; empty unless all ranks have reported that."""
        plan = self._job.plan
        if len(self._usages) < plan.size:
            return ""
        names = rank_names([self._job.hosts[place.host_index].name for place in plan.places])
        return job_line(names, [self._usages[rank] for rank in range(plan.size)])
