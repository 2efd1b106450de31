"""The result of a job: from events to exit code, report and remarks. It reads files of this machine only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from ringcomm.rendezvous.membership import Notice

from ..agent import threads
from ..diagnosis import failure_report
from ..diagnosis.failure_report import (
    NO_DIAGNOSIS,
    Diagnosis,
    is_shown_whole,
    local_file_hint,
    search_path_hint,
    shadow_hint,
    traceback_lines,
)
from ..diagnosis.first_failure import Cause, Exit, FirstFailure
from ..elastic.membership import describe_history
from ..plan.job import HostJob, Job
from ..show.output import Printer
from ..show.visible import visible

BROKEN_PIPE = 141
"""The exit code after the output's reader has ended, as for SIGPIPE in a shell."""
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


@dataclass
class Outcome:
    """The result of a job."""

    exit_code: int  # 0, or the first failed rank's
    report: str  # the box for the user, or ""
    reason: str  # done, failure, start, interrupt or pipe
    cause: Optional[Cause] = None  # the first failure
    exits: Dict[int, Exit] = field(default_factory=dict)
    # per rank, from its result descriptor; None if its signature is not valid
    results: Dict[int, Optional[bytes]] = field(default_factory=dict)
    told: Optional[int] = None  # the rank whose last traceback is complete in the report
    members: Optional[List[int]] = None  # elastic: processes that succeeded, by last rank


def not_started(job: Job, problems: Mapping[int, str], ready: Iterable[int]) -> Outcome:
    """Return the outcome if hosts (by index) could not do their part: one paragraph for each."""
    hosts, known = job.last_hosts, {*problems, *ready}
    texts = {host.name: problems[host.index] for host in job.hosts if host.index in problems}
    told = {name: _shadowed(job, text) or text for name, text in texts.items()}
    silent = [host.name for host in hosts if host.index not in known and host.name not in texts]
    if len(hosts) > 1:
        names = ",".join(host.planned.spec.target for host in hosts)
        told[""] = f"ringrun doctor -H {names} examines these hosts and the network between them."
    text = failure_report.problems_box(told, silent, len(texts), len(hosts))
    return Outcome(1, visible(text), "start")


def ended(
    job: Job, failure: FirstFailure, ending: str, signum: int, tails: Mapping[int, List[str]],
    diagnosis: Diagnosis = NO_DIAGNOSIS, pythons: Optional[Mapping[str, str]] = None, first: str = "",
) -> Outcome:  # fmt: skip
    """Return the outcome of ranks that had started. `ending` is why the launcher ended them, "" if all ended
    without it; `pythons` has known interpreters by host; `first` is put before all other paragraphs.
    """
    exits = dict(failure.exits)
    if ending == "pipe":
        return Outcome(BROKEN_PIPE, "", "pipe", None, exits)
    if ending == "interrupt":
        return Outcome(128 + signum, "", "interrupt", None, exits)
    cause = failure.cause()
    if cause is None:
        return Outcome(0, "", "done", None, exits)
    paragraphs = [first]
    tail = [] if cause.rank is None else tails.get(cause.rank, [])
    if cause.rank is not None:
        paragraphs.append(_shadowed(job, "\n".join(traceback_lines(tail))))
        host = job.host_of(cause.rank)
        paragraphs += [local_file_hint(job, host, tail), search_path_hint(host, tail)]
    hosts = {place.rank: job.hosts[place.host_index].name for place in job.plan.places}
    names = [host.name for host in job.hosts]
    text = failure_report.failure_box(
        failure, hosts, names, tails, diagnosis, pythons, list(filter(None, paragraphs))
    )
    told = cause.rank if is_shown_whole(tail) else None
    return Outcome(failure.exit_code(), visible(text), "failure", cause, exits, told=told)


def with_changes(
    outcome: Outcome, failure: Optional[str], changes: Sequence[Tuple[float, str]],
    excluded: Sequence[str] = (), tail: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Return the outcome of an elastic job from that of its last processes (:func:`ended`). `failure` is why
    the job could not continue, None if it succeeded; `changes` are (seconds since the start, text), of which
    `excluded` are exclusions of hosts and slots; `tail` is the end of the last failed rank's stderr.
    """
    if outcome.reason in ("interrupt", "pipe"):
        return outcome
    history = [f"What changed while the job ran:\n{describe_history(changes)}"] if changes else []
    if failure is None:
        count = len(changes) - len(excluded)
        parts = [f"the ranks changed {count} time{'' if count == 1 else 's'}"] if count else []
        parts += [f"{place} was excluded" for place in dict.fromkeys(excluded)]
        report = failure_report.box(", ".join(parts), history, "exit code 0") if changes else ""
        return replace(outcome, exit_code=0, report=visible(report), reason="done", cause=None, told=None)
    code, report = outcome.exit_code or 1, outcome.report
    if not report:
        paragraphs = [failure, *failure_report.error_paragraphs(tail), *history]
        report = visible(failure_report.box("the job cannot continue", paragraphs, f"exit code {code}"))
    elif history:
        lines = "".join(f"│ {line}\n" for line in history[0].splitlines())
        report = report.replace("\n╰─", f"\n│\n{visible(lines)}╰─")
    return replace(outcome, exit_code=code, reason="failure", report=report)


def _shadowed(job: Job, text: str) -> str:
    """Return a paragraph if a file beside the script replaces the module that an error names, or ""."""
    return shadow_hint(text, Path(job.command.script or "").parent)


# -- remarks ----------------------------------------------------------------------------------


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
                self._printer.show(notice.text)
            return
        if notice.kind == "warning":
            self._topics.add(str(notice.detail.get("topic", "")))
        if notice.kind == "warning" or self._job.settings.verbose:
            self._printer.show(notice.text)

    def ready(self, host: HostJob, facts: Mapping[str, Any]) -> None:
        """Show how a ready host differs from the request, and a searched interpreter."""
        self._printer.show(threads.describe_unbound(host.name, facts["limits"]["unbound"]))
        python = str((facts.get("found") or {}).get("python") or host.python)
        if host.fallback and python != host.python:
            self._printer.show(f"{host.name}: the ranks run {python}")

    def exited(self, facts: Mapping[str, Any]) -> None:
        """Note the end of a rank; ``joined`` tells whether it used ringcomm."""
        self._joined = self._joined or facts.get("joined", True)

    def conclude(self, outcome: Outcome, made_no_call: bool = False) -> None:
        """Show remarks on a job whose ranks all succeeded."""
        job = self._job
        if job.plan.size > 1 and not self._joined and _imports_ringcomm(job.command.script):
            self._printer.show(_ALONE)
        if job.plan.size > 1 and self._joined and made_no_call and job.trains and not job.is_elastic:
            self._printer.show(_NO_CALL)
        if job.settings.advise and "advise" not in self._topics:
            outcome.exit_code = 1
            if "no advice" not in self._topics:
                self._printer.show(_NO_ADVICE)


def _imports_ringcomm(script: Optional[str]) -> bool:
    """Return whether a script imports ringcomm; other scripts may use another library."""
    try:
        return bool(script and _IMPORT.search(Path(script).read_text("utf-8", "replace")))
    except OSError:
        return False
