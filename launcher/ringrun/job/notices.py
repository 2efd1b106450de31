"""What is said of a running job, apart from failures: warnings, refusals, waiting times."""

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
    """Shows what is for the user, and keeps what the ranks report at their end.

    Args:
        job: what the notices are about.
        printer: shows them.
    """

    def __init__(self, job: Job, printer: Printer) -> None:
        self._job, self._printer = job, printer
        self._joined = False  # whether any process has called init()
        self._refusals: Set[str] = set()
        self._topics: Set[str] = set()

    def take(self, notice: Notice) -> None:
        """The rendezvous has sent a notice."""
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
        """A host is ready: show what it does otherwise than asked, and an interpreter that was looked for.

        Returns:
            the facts.
        """
        self._printer.note(binding.describe(host.name, facts["limits"]["unbound"]))
        python = str((facts.get("found") or {}).get("python") or host.python)
        if host.fallback and python != host.python:
            self._printer.note(f"{host.name}: the ranks run {python}")
        return facts

    def exited(self, facts: Mapping[str, Any]) -> None:
        """A rank has ended; ``joined`` is whether it has used ringcomm."""
        self._joined = self._joined or facts.get("joined", True)

    def conclude(self, outcome: Outcome, made_no_call: bool = False) -> None:
        """All ranks have ended well: show what that says, and have a job fail that has not measured.

        Args:
            outcome: gets exit code 1 if advice was asked for, and there is none.
            made_no_call: whether the ranks have made no collective.
        """
        settings = self._job.settings
        if self._job.plan.size > 1:
            if not self._joined and _imports_ringcomm(self._job.command.script):
                self._printer.note(_ALONE)
            recorded = settings.flight_recorder and not self._job.is_elastic
            if self._joined and made_no_call and recorded and self._job.trains:
                self._printer.note(_NO_CALL)
        if settings.advise and "advise" not in self._topics:
            outcome.exit_code = 1
            if "no advice" not in self._topics:
                self._printer.show(_NO_ADVICE)


def _imports_ringcomm(script: Optional[str]) -> bool:
    """Return whether a script imports ringcomm. Others may use another library, or need none."""
    try:
        return bool(
            script and Path(script).is_file() and _IMPORT.search(Path(script).read_text("utf-8", "replace"))
        )
    except OSError:
        return False
