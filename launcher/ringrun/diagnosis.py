"""Who is behind, and who waits for whom. Pure: reports of ranks go in, a few sentences come out.

A rank that waits is a victim, whatever it says about others. So whoever is waited for is followed until
somebody is found who does not wait.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Set, Tuple

from .report import ranks_text
from .reports import Lane, Operation, Report

MOST_LINES = 12
_STATES = {
    "T": "its process is stopped (SIGSTOP, Ctrl-Z, or a debugger)",
    "t": "a debugger holds its process",
    "D": "its process waits for a disk or a network file system, or is swapped out",
    "Z": "its process has ended",
    "R": "a C call keeps the interpreter lock and computes",
    "S": "a C call keeps the interpreter lock and sleeps, or the program does not use ringcomm",
}

_CODE = "exit code"

UNCAUGHT = "uncaught "
"""How a rank says that its own program has failed."""

MISMATCH = "MismatchError: "
"""How a rank says that another one has made another call."""

Place = Tuple[Lane, Operation]
Waits = Dict[int, Set[int]]
"""For each rank that waits, for whom."""


def diagnose(reports: Mapping[int, Report]) -> List[str]:
    """Sentences for people, one per line: what ranks wait in, where the others are, and what follows."""
    waiting = {rank: _waits_in(report) for rank, report in reports.items()}
    waits = waits_for(reports)
    wanted = {other for others in waits.values() for other in others}
    lines = _waiters(reports, waiting) + _alike(reports)
    for rank, report in sorted(reports.items()):
        if waiting[rank] is None and not _shares(report):
            lines.append(_sentence(report, rank in wanted))
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"({len(lines) - MOST_LINES} more are in the files.)"]
    conclusion = _conclusion(reports, waiting, waits)
    return [*lines, conclusion] if conclusion else lines


def waits_for(reports: Mapping[int, Report]) -> Waits:
    """For each rank that waits, the ranks that have not come to where it waits."""
    found: Waits = {}
    for rank, report in reports.items():
        place = _waits_in(report)
        if place is None:
            continue
        lane, operation = place
        if lane.ordered:
            missing = {other for other in lane.members if _behind(reports.get(other), lane, operation.number)}
        elif operation.state == "submitted":
            members = lane.sets.get(operation.key[0], lane.members)
            missing = {other for other in members if _has_not_come(reports.get(other), lane, operation)}
        else:
            missing = set()
        away = {other for other in lane.members if other in reports and _is_away(reports[other])}
        found[rank] = (missing or away) - {rank}
    return found


def _waits_in(report: Report) -> Optional[Place]:
    """The operation in which a rank waits for others, or failed because of them."""
    failed = report.reason == "failure"
    if report.error.startswith(UNCAUGHT) or _has_left(report):
        return None
    for lane in report.lanes:
        last = lane.operations[-1] if lane.operations else None
        if lane.ordered and last is not None and last.state in ("running", "failed"):
            return lane, last
    if not (report.blocked or failed):
        return None  # what is on its way by name need not be waited for
    named = [(lane, operation) for lane in report.lanes if not lane.ordered for operation in lane.operations]
    for state in ("running", "submitted"):
        for lane, operation in named:
            if operation.state == state:
                return lane, operation
    return next((place for place in reversed(named) if failed and place[1].state == "failed"), None)


def _same_lane(report: Report, lane: Lane) -> Optional[Lane]:
    return next((item for item in report.lanes if item[:3] == lane[:3]), None)


def _behind(report: Optional[Report], lane: Lane, number: int) -> bool:
    """Whether a rank is known not to have come to a certain call."""
    if report is None or _is_silent(report) or report.error.startswith(UNCAUGHT):
        return report is not None
    theirs = _same_lane(report, lane)
    if theirs is None or not theirs.operations:
        return True
    return theirs.operations[-1].number < number


def _has_not_come(report: Optional[Report], lane: Lane, wanted: Operation) -> bool:
    if report is None or _is_silent(report) or report.error.startswith(UNCAUGHT):
        return report is not None
    theirs = _same_lane(report, lane)
    pending = [] if theirs is None else [item for item in theirs.operations if not item.over]
    return wanted.key not in [item.key for item in pending]


def _is_silent(report: Report) -> bool:
    return report.reason in ("silent", "nothing")


def _has_left(report: Report) -> bool:
    return report.reason == "ended" or bool(report.left)


def _is_away(report: Report) -> bool:
    """Whether it can do nothing for others, whatever it did last."""
    return _is_silent(report) or _has_left(report)


def _waiters(reports: Mapping[int, Report], waiting: Mapping[int, Optional[Place]]) -> List[str]:
    """Those who wait in the same operation, in one line."""
    groups: Dict[str, List[int]] = {}
    for rank, place in sorted(waiting.items()):
        if place is not None:
            groups.setdefault(_waiting_text(place[1]), []).append(rank)
    lines = []
    for text, ranks in groups.items():
        if len(ranks) == 1:
            lines.append(f"{_name(reports[ranks[0]])} waits in {text}.")
        else:
            lines.append(f"{ranks_text(ranks).capitalize()} wait in {text}.")
    return lines


def _shares(report: Report) -> bool:
    """Whether a rank has ended with an error that others have, too."""
    return report.error.startswith(UNCAUGHT + MISMATCH)


def _alike(reports: Mapping[int, Report]) -> List[str]:
    """Those who have ended with the same error, in one line."""
    groups: Dict[str, List[int]] = {}
    for rank, report in sorted(reports.items()):
        if _shares(report):
            groups.setdefault(_uncaught(report), []).append(rank)
    return [
        f"{_name(reports[ranks[0]])} {text}."
        if len(ranks) == 1
        else f"{ranks_text(ranks).capitalize()} {text.replace('; its last', '; their last')}."
        for text, ranks in groups.items()
    ]


def _uncaught(report: Report) -> str:
    last = _last(report)
    at = f"; its last operation was {last.text()}" if last is not None else ""
    return f"ended with an {report.error.splitlines()[0].rstrip('.')}{at}"


def _waiting_text(operation: Operation) -> str:
    moved = operation.moved
    return operation.text() + ("" if moved is None else f", {_bytes(moved)} moved")


def _sentence(report: Report, is_wanted: bool) -> str:
    """Where a rank is that does not wait, and perhaps is waited for."""
    last = _last(report)
    at = f"; its last operation was {last.text()}" if last is not None else ""
    where = f"; its main thread is in {report.main}" if report.main else ""
    if report.reason == "nothing" and report.end.startswith(_CODE):
        return f"{_name(report)} ended with {report.end} and left nothing behind."
    if report.reason == "nothing":
        return f"{_name(report)} left nothing behind: {report.end or 'nobody could ask it'}."
    if report.reason == "silent":
        since = f". It has ended since then: {report.end}" if report.end else ""
        why = f"{_STATES.get(report.state, 'the reason is not known')}{where}"
        return f"{_name(report)} did not answer: {why}{since}."
    if report.error.startswith(UNCAUGHT):
        return f"{_name(report)} {_uncaught(report)}."
    if _has_left(report):
        before = ", before the operation in which others wait" if is_wanted else ""
        stays = "" if report.end or report.reason == "ended" else where
        return f"{_name(report)} {_farewell(report)}{before}{at}{stays}."
    parts = ["has called nothing yet"]
    if last is not None:
        done = ", which is done" if last.over else ""
        parts = [f"is at op {last.number}, {last.label} ({last.place}){done}"]
    if report.paused:
        parts.append(f'it has said that it is away: "{report.paused}"')
    return f"{_name(report)} {'; '.join(parts)}{where}."


def _farewell(report: Report) -> str:
    """How a rank went that had no reason to complain."""
    if report.end:
        return f"has ended{' with' if report.end.startswith(_CODE) else ':'} {report.end}"
    return "has come to the end of its program" if report.reason == "ended" else f"has left: {report.left}"


def _last(report: Report) -> Optional[Operation]:
    """What a rank has begun last, in whichever lane."""
    found = [lane.operations[-1] for lane in report.lanes if lane.operations]
    return max(found, key=lambda operation: operation.at, default=None)


def _name(report: Report) -> str:
    return f"Rank {report.rank} ({report.host})"


def _bytes(count: int) -> str:
    return "nothing" if count == 0 else f"{count} bytes"


def _conclusion(reports: Mapping[int, Report], waiting: Mapping[int, Optional[Place]], waits: Waits) -> str:
    """Whom all the waiting leads back to."""
    if not waits:
        return "No rank waits for another."
    wanted = {other for others in waits.values() for other in others}
    behind = sorted(rank for rank in wanted if rank not in waits)
    if behind:
        who = sorted(waits)
        verb = "waits" if len(who) == 1 else "wait"
        return f"{ranks_text(who).capitalize()} {verb} for {ranks_text(behind)}."
    if wanted:
        return (
            f"{ranks_text(sorted(waits)).capitalize()} wait for each other: they do not make the same calls "
            "in the same order."
        )
    if any(report.error.startswith(MISMATCH) for report in reports.values()):
        return "They do not make the same calls."
    calls = {place[1].what for place in waiting.values() if place is not None and place[0].ordered}
    if len(calls) > 1:
        return f"They do not make the same call: {'; '.join(sorted(calls))}."
    return "All who were asked have come to this operation: it is the network that they wait for."
