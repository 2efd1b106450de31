"""Messages about a running job, except for failures: warnings, refusals, waiting times."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Set

from ringcomm.rendezvous.actions import Notice

from ..agent import binding
from ..plan.job import HostJob, Job
from ..show.printer import Printer
from .outcome import Outcome

REFUSALS_SHOWN = 20
_ALONE = "no rank called ringcomm.init(): each trained alone"
_IMPORT = re.compile(r"^\s*(import|from)\s+(ringcomm|horovod)\b", re.MULTILINE)
_NO_CALL = (
    "every rank called init(), and none made a collective: if they were to train one model, each has trained "
    "its own. A DistributedOptimizer, or allreduce() of the gradients, makes them train together"
)
_NO_ADVICE = (
    "No advice: the program ended without it. It must call init() of ringcomm or of an adapter, and take its "
    "data from balanced batches (see docs/unequal.md)."
)


class Notices:
    """Shows messages for the user, and keeps the topics that ranks report at their end."""

    def __init__(self, job: Job, printer: Printer) -> None:
        self._job, self._printer = job, printer
        self._joined = False  # whether any process has called init()
        self._refusals: Set[str] = set()
        self._topics: Set[str] = set()

    def take(self, notice: Notice) -> None:
        """Show or keep a notice of the rendezvous."""
        self._joined = self._joined or notice.kind not in ("log", "refused")
        if notice.kind == "refused":
            if notice.text not in self._refusals and len(self._refusals) < REFUSALS_SHOWN:
                self._refusals.add(notice.text)  # a program may try again and again
                more = " (further ones are not shown)" if len(self._refusals) == REFUSALS_SHOWN else ""
                self._printer.show(f"{notice.text}{more}")
            return
        if notice.kind == "warning":
            self._topics.add(str(notice.detail.get("topic", "")))
        if notice.kind == "warning" or (self._job.settings.verbose and notice.text):
            self._printer.show(notice.text)

    def ready(self, host: HostJob, facts: Dict[str, Any]) -> Dict[str, Any]:
        """Show how a ready host differs from the request, and a searched interpreter; return `facts`."""
        self._printer.show(binding.describe(host.name, facts["limits"]["unbound"]))
        python = str((facts.get("found") or {}).get("python") or host.python)
        if host.fallback and python != host.python:
            self._printer.show(f"{host.name}: the ranks run {python}")
        return facts

    def exited(self, facts: Mapping[str, Any]) -> None:
        """Note the end of a rank; ``joined`` tells whether it used ringcomm."""
        self._joined = self._joined or facts.get("joined", True)

    def conclude(self, outcome: Outcome, made_no_call: bool = False) -> None:
        """Show remarks on a job whose ranks all succeeded. Set exit code 1 in `outcome` if advice was
        requested and there is none.
        """
        settings = self._job.settings
        if self._job.plan.size > 1:
            if not self._joined and _imports_ringcomm(self._job.command.script):
                self._printer.show(_ALONE)
            if self._joined and made_no_call and self._job.trains and not self._job.is_elastic:
                self._printer.show(_NO_CALL)
        if settings.advise and "advise" not in self._topics:
            outcome.exit_code = 1
            if "no advice" not in self._topics:
                self._printer.show(_NO_ADVICE)


def _imports_ringcomm(script: Optional[str]) -> bool:
    """Return whether a script imports ringcomm; other scripts may use another library."""
    try:
        return bool(
            script and Path(script).is_file() and _IMPORT.search(Path(script).read_text("utf-8", "replace"))
        )
    except OSError:
        return False
