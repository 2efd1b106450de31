"""How a job went. Pure: what happened goes in, exit code and report come out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Mapping, Optional

from ..diagnosis import failure_report
from ..diagnosis.first_failure import Cause, Exit, FirstFailure
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
        to_show: ranks whose tracebacks the report shows in part only.
    """

    exit_code: int
    report: str
    reason: str
    cause: Optional[Cause] = None
    exits: Dict[int, Exit] = field(default_factory=dict)
    results: Dict[int, Optional[bytes]] = field(default_factory=dict)
    to_show: List[int] = field(default_factory=list)


def not_started(job: Job, problems: Mapping[int, str], ready: Iterable[int]) -> Outcome:
    """Hosts (by index) could not do their part: one paragraph each."""
    told = {job.hosts[index].name: text for index, text in sorted(problems.items())}
    known = {*problems, *ready}
    silent = [host.name for host in job.hosts if host.index not in known]
    if len(job.hosts) > 1:
        names = ",".join(host.planned.spec.target for host in job.hosts)
        told[""] = f"ringrun doctor -H {names} examines these hosts and the network between them."
    text = failure_report.problems_box(told, silent, len(problems), len(job.hosts))
    return Outcome(1, visible(text), "start")


def ended(
    job: Job, failure: FirstFailure, ending: str, signum: int, tails: Mapping[int, List[str]],
    lines: str = "", diagnosis: str = "", pythons: Optional[Mapping[str, str]] = None,
) -> Outcome:  # fmt: skip
    """The ranks had started.

    Args:
        ending: why we ended them, "" if they all ended by themselves.
        lines: which calls came from different lines of the program.
        diagnosis: which ranks waited for which.
        pythons: by host's name, its interpreter where that is known.
    """
    exits = dict(failure.exits)
    if ending == "pipe":
        return Outcome(BROKEN_PIPE, "", "pipe", None, exits)
    if ending == "interrupt":
        return Outcome(128 + signum, "", "interrupt", None, exits)
    if not failure.failed:
        return Outcome(0, "", "done", None, exits)
    hosts = {place.rank: job.hosts[place.host_index].name for place in job.plan.places}
    names = [host.name for host in job.hosts]
    text = failure_report.failure_box(failure, hosts, names, tails, diagnosis, lines, pythons)
    cause = failure.cause()
    in_part = [
        rank for rank, tail in tails.items()
        if cause is not None and rank == cause.rank and not failure_report.is_shown_whole(tail)
    ]  # fmt: skip
    return Outcome(failure.exit_code(), visible(text), "failure", cause, exits, to_show=in_part)
