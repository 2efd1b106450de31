"""How a job went: what happened goes in, exit code and report come out. Pure, but looks beside the script."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ..diagnosis import failure_report
from ..diagnosis.first_failure import Cause, Exit, FirstFailure
from ..diagnosis.local_files import local_file_hint
from ..diagnosis.shadowing import shadow_hint
from ..diagnosis.tracebacks import is_shown_whole, traceback_lines
from ..elastic.changes import describe_history
from ..plan.job import Job
from ..show.visible import visible

BROKEN_PIPE = 141
"""The exit code when the reader of the output has ended: that of SIGPIPE in a shell."""


@dataclass
class Outcome:
    """How a job went.

    Attributes:
        exit_code: for the launcher: 0, or the first failed rank's.
        report: the box for the user; "" if there is none.
        reason: ``done``, ``failure``, ``start``, ``interrupt`` or ``pipe``.
        cause: the first failure.
        exits: how each rank ended, as far as is known.
        results: for each rank, what it wrote to its result descriptor; None if that was not signed by it.
        members: for an elastic job: the processes that have ended well, in the order of their last ranks.
        to_show: ranks whose tracebacks are shown in any case: those that the report has in part only, and all
            with ``--verbose``.
        reported: the lines of the traceback that the report shows.
    """

    exit_code: int
    report: str
    reason: str
    cause: Optional[Cause] = None
    exits: Dict[int, Exit] = field(default_factory=dict)
    results: Dict[int, Optional[bytes]] = field(default_factory=dict)
    to_show: List[int] = field(default_factory=list)
    reported: List[str] = field(default_factory=list)
    members: Optional[List[int]] = None


def not_started(job: Job, problems: Mapping[int, str], ready: Iterable[int]) -> Outcome:
    """Hosts (by index) could not do their part: one paragraph each."""
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
    lines: str = "", diagnosis: str = "", pythons: Optional[Mapping[str, str]] = None, first: str = "",
) -> Outcome:  # fmt: skip
    """The ranks had started.

    Args:
        ending: why we ended them, "" if they all ended by themselves.
        lines: which calls came from different lines of the program.
        diagnosis: which ranks waited for which.
        pythons: by host's name, its interpreter where that is known.
        first: a paragraph before all others, or "".
    """
    exits = dict(failure.exits)
    if ending == "pipe":
        return Outcome(BROKEN_PIPE, "", "pipe", None, exits)
    if ending == "interrupt":
        return Outcome(128 + signum, "", "interrupt", None, exits)
    if not failure.failed:
        return Outcome(0, "", "done", None, exits)
    if not (job.is_elastic or job.restarts):
        diagnosis = "\n\n".join(filter(None, (lost_host_remedy(failure), diagnosis)))
    hosts = {place.rank: job.hosts[place.host_index].name for place in job.plan.places}
    names = [host.name for host in job.hosts]
    cause = failure.cause()
    said = [] if cause is None or cause.rank is None else traceback_lines(tails.get(cause.rank, []))
    first = "\n\n".join(filter(None, (first, _shadowed(job, "\n".join(said)), _only_here(job, cause, tails))))
    rank = -1 if cause is None or cause.rank is None else cause.rank
    search_path = _lacking_search_path(job, rank)
    text = failure_report.failure_box(
        failure, hosts, names, tails, diagnosis, lines, pythons, first, search_path
    )
    code, report = failure.exit_code(), visible(text)
    tail = tails.get(rank, [])
    if job.settings.verbose or not is_shown_whole(tail):
        to_show = list(tails) if job.settings.verbose else [rank]
        return Outcome(code, report, "failure", cause, exits, to_show=to_show)
    return Outcome(code, report, "failure", cause, exits, reported=traceback_lines(tail))


def _lacking_search_path(job: Job, rank: int) -> str:
    """PYTHONPATH of the launching shell, if a rank on another host runs without it; or ""."""
    places = [place for place in job.plan.places if place.rank == rank]
    host = job.hosts[places[0].host_index] if places else None
    if host is None or host.is_local or "PYTHONPATH" in host.env:
        return ""
    return os.environ.get("PYTHONPATH", "")


def lost_host_remedy(failure: FirstFailure) -> str:
    """Return what makes a job survive the loss of a host, if it has failed because of one; else ""."""
    cause = failure.cause()
    if cause is None or cause.host_index is None:
        return ""
    return (
        "With --restarts N ringrun starts such a job again, from the checkpoint that the program loads. With "
        "--min-np N the ranks of the other hosts go on; the program has to use rc.elastic for that "
        "(docs/elastic.md)."
    )


def with_changes(
    outcome: Outcome, failure: Optional[str], changes: Sequence[Tuple[float, str]],
    excluded: Sequence[str] = (), tail: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """The outcome of an elastic job.

    Args:
        outcome: of its processes since the last change of the ranks; see :func:`ended`.
        failure: why the job could not continue; None if it has succeeded.
        changes: seconds since the start, and what has changed.
        excluded: the hosts and slots of those changes that are exclusions.
        tail: the last lines on stderr of the last rank that has failed.
    """
    if outcome.reason in ("interrupt", "pipe"):
        return outcome
    history = [f"What changed while the job ran:\n{describe_history(changes)}"] if changes else []
    if failure is None:
        count = len(changes) - len(excluded)
        parts = [f"the ranks changed {count} time{'' if count == 1 else 's'}"] if count else []
        parts += [f"{place} was excluded" for place in dict.fromkeys(excluded)]
        title = ", ".join(parts)
        report = failure_report.box(title, history, "exit code 0") if changes else ""
        return replace(
            outcome, exit_code=0, report=visible(report), reason="done", cause=None, to_show=[], reported=[]
        )
    code = outcome.exit_code or 1
    if not outcome.report:
        title, last = "the job cannot continue", f"exit code {code}"
        outcome.exit_code, outcome.reason = code, "failure"
        outcome.report = visible(
            failure_report.box(title, [failure, *failure_report.error_paragraphs(tail), *history], last)
        )
    elif history:
        outcome.report = outcome.report.replace("\n╰─", "\n│\n" + visible(_lines(history[0])) + "╰─")
    return outcome


def _lines(paragraph: str) -> str:
    """A paragraph as lines inside a box."""
    return "".join(f"│ {line}\n" for line in paragraph.splitlines())


def verified_results(job: Job, results: Mapping[int, bytearray]) -> Dict[int, Optional[bytes]]:
    """Return what each rank wrote to its result descriptor, b"" if nothing.

    None if that was not signed by it.
    """
    return {rank: job.verified_result(rank, bytes(data)) if data else b"" for rank, data in results.items()}


def _only_here(job: Job, cause: Optional[Cause], tails: Mapping[int, List[str]]) -> str:
    """A paragraph if the first failure is that of a rank that lacks a file of this machine."""
    if cause is None or cause.rank is None:
        return ""
    return local_file_hint(job, job.host_of(cause.rank), tails.get(cause.rank, []))


def _shadowed(job: Job, text: str) -> str:
    """A paragraph if a file beside the script is imported instead of the module that an error names."""
    return shadow_hint(text, Path(job.command.script or "").parent)
