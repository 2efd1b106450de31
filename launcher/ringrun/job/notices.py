"""What the rendezvous says of a running job, apart from failures: warnings, refusals, waiting times."""

from __future__ import annotations

from typing import Dict

from ringcomm.balance.replan import rank_names
from ringcomm.balance.unequal import Usage, job_line

from ..plan.job import Job
from ..show.printer import Printer
from .rendezvous import NoticeLike

REFUSALS_SHOWN = 20


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

    def take(self, notice: NoticeLike) -> None:
        """The rendezvous has sent a notice."""
        if notice.kind == "usage" and notice.rank is not None:
            self._usages[notice.rank] = Usage(**notice.detail)
        elif notice.kind == "refused":
            self._refusals += 1
            if self._refusals <= REFUSALS_SHOWN:
                more = " (further ones are not shown)" if self._refusals == REFUSALS_SHOWN else ""
                self._printer.show(f"refused: {notice.text}{more}")
        elif notice.kind == "warning" or (self._job.settings.verbose and notice.text):
            self._printer.show(notice.text)

    def unequal(self) -> str:
        """Which rank waited for which, and what that cost; empty unless all ranks have reported that."""
        plan = self._job.plan
        if len(self._usages) < plan.size:
            return ""
        names = rank_names([self._job.hosts[place.host_index].name for place in plan.places])
        return job_line(names, [self._usages[rank] for rank in range(plan.size)])
