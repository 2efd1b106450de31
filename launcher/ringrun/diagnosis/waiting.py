"""Which ranks wait for which, and which are behind. Pure: flight records of ranks go in, sentences come out.

A rank that waits is a victim, whatever it reports about others. So the ranks that it waits for are followed
until one is found that does not wait. Ranks that made different calls where the calls must be the same do not
wait for another rank: they disagree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ringcomm.engine import stacks
from ringcomm.engine.deadlocks import behind, waiting_for_each_other
from ringcomm.engine.stacks import Frame
from ringcomm.errors import ProtocolError

from ..reach.incoming import decoded, fields, flag, items, maybe, number, one_of, row, table, whole
from .first_failure import ranks_text

MAX_LINES = 12
_STATES = {
    "T": "its process is stopped (SIGSTOP, Ctrl-Z, or a debugger)",
    "t": "a debugger holds its process",
    "D": "its process waits for a disk or a network file system, or is swapped out",
    "Z": "its process has ended",
    "R": "a C call keeps the interpreter lock and computes",
    "starved": "its threads wait for a processor, as its host is busy",
    "S": "a C call keeps the interpreter lock and sleeps",
    "absent": "it has not called init() yet",
}
UNCAUGHT = "uncaught "
"""The beginning of a rank's error if its program has failed."""
MISMATCH = "MismatchError: "
"""The beginning of a rank's error if another one has made another call."""
LOST_WITH_HOST = "lost with its host"
"""The end of a rank on a host that was lost."""


class ReportedOperation(NamedTuple):
    """One operation of a rank."""

    number: int  # counts the rank's operations in this channel
    label: str  # kind, and the program's name for it, like "allreduce `conv3.grad`"
    key: Tuple[int, str, int]  # identifies the operation on all ranks where order does not
    what: str  # the call with everything that ranks must agree on
    place: str  # train.py:88
    state: str  # submitted, running, done or failed
    moved: Optional[int]  # bytes so far, if known
    at: float  # begun or submitted, in seconds of that host's wall clock
    peer: Optional[int] = None  # the other rank of a message; None: any

    def text(self) -> str:
        """Return ``allreduce `conv3.grad` (op 812, train.py:88)``, or ``message 5 from rank 0 (…)``."""
        number = "" if self.label.startswith("message ") else f"op {self.number}, "
        return f"{self.label} ({number}{self.place})"


class ReportedChannel(NamedTuple):
    """Operations that run on the same links."""

    name: str
    ordered: bool  # equal numbers mean the same operation on all ranks
    members: Tuple[int, ...]
    sets: Dict[int, Tuple[int, ...]]  # by number, the members of process sets
    operations: Tuple[ReportedOperation, ...]
    # by rank: messages posted to it, and from it; None if these are calls
    messages: Optional[Dict[int, Tuple[int, int]]] = None


@dataclass(frozen=True)
class RankReport:
    """The report of one rank."""

    rank: int
    host: str
    reason: str = "nothing"  # failure, asked, ended, silent (no answer), or nothing (no process)
    error: str = ""
    culprit: Optional[int] = None  # the rank that caused its error, if known
    end: str = ""  # of its process
    state: str = ""  # of a silent process, as ps shows it, or starved
    main: str = ""  # where the main thread is, like "load (loader.py:12)", or ""
    blocked: bool = False  # the main thread waits in ringcomm
    paused: str = ""  # its reason for an announced absence, or ""
    left: str = ""  # its reason for a regular leave, or ""
    channels: Tuple[ReportedChannel, ...] = ()


Place = Tuple[ReportedChannel, ReportedOperation]
Waits = Dict[int, Set[int]]
"""For each rank that waits, the ranks that it waits for."""


class Dispute(NamedTuple):
    """Calls that should be the same on all ranks of a channel, and differ."""

    channel: ReportedChannel
    sides: List[Tuple[ReportedOperation, List[int]]]  # each with its ranks, most ranks first

    @property
    def ranks(self) -> List[int]:
        return sorted(rank for _, side in self.sides for rank in side)


def diagnose(reports: Mapping[int, RankReport], names_calls: bool = False) -> List[str]:
    """Return lines for the user; `names_calls`: the user has read which calls differ."""
    waiting = {rank: _waits_in(report) for rank, report in reports.items()}
    waits, quarrels = waits_for(reports), disputes(reports)
    wanted = {other for others in waits.values() for other in others}
    at_odds = {rank for dispute in quarrels for rank in dispute.ranks}
    lines = _waiters(reports, {rank: place for rank, place in waiting.items() if rank not in at_odds})
    lines += _failed(reports, names_calls)
    for rank, report in sorted(reports.items()):
        if waiting[rank] is None and not has_failed(report):
            lines.append(_describe(report, rank in wanted))
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"({len(lines) - MAX_LINES} more are in the files.)"]
    return [*lines, *_conclusions(reports, waits, quarrels, names_calls)]


def disputes(reports: Mapping[int, RankReport]) -> List[Dispute]:
    """Return the calls that should be the same and differ."""
    channels: Dict[Any, ReportedChannel] = {}
    calls_made: Dict[Any, Dict[str, Tuple[ReportedOperation, List[int]]]] = {}
    for rank, report in sorted(reports.items()):
        place = _waits_in(report)
        if place is not None and place[0].messages is None:
            channel, operation = place
            where = (*channel[:3], operation.number if channel.ordered else operation.key)
            channels[where] = channel
            calls_made.setdefault(where, {}).setdefault(operation.what, (operation, []))[1].append(rank)
    return [
        Dispute(channels[where], sorted(sides.values(), key=lambda side: (-len(side[1]), side[1])))
        for where, sides in calls_made.items()
        if len(sides) > 1
    ]


def waits_for(reports: Mapping[int, RankReport]) -> Waits:
    """Return for each waiting rank the ranks that have not reached its operation."""
    found: Waits = {}
    at_odds = {rank for dispute in disputes(reports) for rank in dispute.ranks}
    away = {rank for rank, report in reports.items() if _is_silent(report) or _has_left(report)}
    for rank, report in reports.items():
        place = _waits_in(report)
        if place is None or rank in at_odds or has_met_another_call(report):
            continue
        channel, operation = place
        others = set(channel.members)
        if operation.peer is not None:
            others = {operation.peer}
        elif not channel.ordered and channel.messages is None:
            others = set(channel.sets.get(operation.key[0], others))
            others = others if operation.state == "submitted" else set()
        missing = {other for other in others if _lacks(reports.get(other), rank, place)}
        if channel.messages is None:
            missing = missing or away.intersection(channel.members)
        found[rank] = missing - {rank}
    return found


def _waits_in(report: RankReport) -> Optional[Place]:
    """Return the operation in which a rank waits for others, or failed because of them."""
    failed = report.reason == "failure" or _is_victim(report)
    if has_failed(report) or _has_left(report):
        return None
    waited, named = [], []
    for channel in report.channels:
        places = [(channel, operation) for operation in channel.operations]
        by_name = not channel.ordered and channel.messages is None
        named += places if by_name else []
        waited += [] if by_name else places[-1:] if channel.ordered else places
    for wanted in ("running", "failed"):
        # A group that has failed may have been given up, and others used since.
        places = [place for place in waited if place[1].state == wanted]
        if places:
            return max(places, key=lambda place: place[1].at)
    if not (report.blocked or failed):
        return None  # the program need not wait for named operations that are under way
    states = {place[1].state: place for place in named if place[1].state == "failed"} if failed else {}
    states.update((place[1].state, place) for place in reversed(named) if place[1].state != "failed")
    return states.get("running") or states.get("submitted") or states.get("failed")


def _same_channel(report: RankReport, channel: ReportedChannel) -> Optional[ReportedChannel]:
    return next((item for item in report.channels if item[:3] == channel[:3]), None)


def _lacks(report: Optional[RankReport], rank: int, place: Place) -> bool:
    """Return whether a rank is known not to have done its part of the operation in which `rank` waits."""
    channel, operation = place
    if report is None or _is_silent(report):
        return report is not None
    theirs = _same_channel(report, channel)
    if channel.messages is not None:
        done = _posted(report, rank, place)
        return done is None or operation.peer is None or done < operation.number
    if has_failed(report):
        return True
    if channel.ordered:
        return theirs is None or not theirs.operations or theirs.operations[-1].number < operation.number
    return theirs is None or not any(
        item.key == operation.key for item in theirs.operations if item.state != "done"
    )


def _posted(report: RankReport, rank: int, place: Place) -> Optional[int]:
    """Return how many messages the reporter sent to a rank, or began to receive from it; None: unknown."""
    theirs = _same_channel(report, place[0])
    if theirs is None or theirs.messages is None:
        return None
    sent, received = theirs.messages.get(rank, (0, 0))
    return received if " to " in place[1].label else sent


def has_met_another_call(report: RankReport) -> bool:
    """Return whether a rank failed because others made another call, not because one of them ended so."""
    return report.error.startswith(MISMATCH) and report.culprit is None


def has_failed(report: RankReport) -> bool:
    """Return whether a rank's own program failed, not because of another rank."""
    return report.error.startswith(UNCAUGHT) and not _is_victim(report)


def _is_victim(report: RankReport) -> bool:
    """Return whether a rank failed because of another one, which it names."""
    return bool(report.error) and report.culprit not in (None, report.rank)


def _is_silent(report: RankReport) -> bool:
    return report.reason in ("silent", "nothing")


def _has_left(report: RankReport) -> bool:
    return (report.reason == "ended" and not _is_victim(report)) or bool(report.left)


def _waiters(reports: Mapping[int, RankReport], waiting: Mapping[int, Optional[Place]]) -> List[str]:
    """Return a line for each group of ranks that wait in the same operation."""
    texts: Dict[int, str] = {}
    for rank, place in waiting.items():
        if place is not None:
            moved = place[1].moved
            texts[rank] = f"waits in {place[1].text()}"
            if moved is not None:
                texts[rank] += f", {f'{moved} bytes' if moved else 'nothing'} moved"
            if place[0].messages is not None:
                texts[rank] = _message_text(rank, place, reports)
            if has_met_another_call(reports[rank]):
                texts[rank] = f"failed in {place[1].text()}"
    return _grouped(reports, texts, "waits in", "wait in")


def _failed(reports: Mapping[int, RankReport], names_calls: bool) -> List[str]:
    """Return a line for each group of ranks that ended with the same error."""
    texts = {}
    for rank, report in reports.items():
        if has_failed(report) and not (names_calls and report.error.startswith(UNCAUGHT + MISMATCH)):
            last = _last(report)
            at = f"; its last operation was {last.text()}" if last is not None else ""
            texts[rank] = f"ended with an {report.error.partition(chr(10))[0].rstrip('.')}{at}"
    return _grouped(reports, texts, "; its last", "; their last")


def _grouped(reports: Mapping[int, RankReport], texts: Mapping[int, str], one: str, many: str) -> List[str]:
    """Return a line for all ranks with the same text, with the words `one` replaced by `many` for several."""
    groups: Dict[str, List[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return [
        f"{_name(reports[ranks[0]])} {text}."
        if len(ranks) == 1
        else f"{ranks_text(ranks).capitalize()} {text.replace(one, many, 1)}."
        for text, ranks in groups.items()
    ]


def _message_text(rank: int, place: Place, reports: Mapping[int, RankReport]) -> str:
    """Return ``waits for message 5 from rank 0 (…), which has sent 4``."""
    message = place[1]
    taken, done = (" to be taken", "asked for") if " to " in message.label else ("", "sent")
    partner = None if message.peer is None else reports.get(message.peer)
    count = None if partner is None else _posted(partner, rank, place)
    more = "" if count is None else f", which has {done} {count or 'none'}"
    return f"waits for {message.text()}{taken}{more}"


def _describe(report: RankReport, is_wanted: bool) -> str:
    """Return the place of a rank that does not wait; other ranks may wait for it."""
    last = _last(report)
    at = f"; its last operation was {last.text()}" if last is not None else ""
    where = f"; its main thread is in {report.main}" if report.main else ""
    if report.reason == "nothing" and report.end == LOST_WITH_HOST:
        return f"{_name(report)} was {report.end}."
    if report.reason == "nothing" and report.end.startswith("exit code"):
        return f"{_name(report)} ended with {report.end} and left nothing behind."
    if report.reason == "nothing":
        return f"{_name(report)} left nothing behind: {report.end or 'no process could ask it'}."
    if report.reason == "silent":
        since = f". It has ended since then: {report.end}" if report.end else ""
        why = f"{_STATES.get(report.state, 'the reason is not known')}{where}"
        return f"{_name(report)} did not answer: {why}{since}."
    if _has_left(report):
        before = ", before the operation in which others wait" if is_wanted else ""
        stays = "" if report.end or report.reason == "ended" else where
        return f"{_name(report)} {_farewell(report)}{before}{at}{stays}."
    parts = ["has called nothing yet"]
    if last is not None:
        done = ", which is done" if last.state == "done" else ""
        what = f"op {last.number}, {last.label} ({last.place})"
        parts = [f"is at {last.text() if last.label.startswith('message ') else what}{done}"]
    if report.paused:
        parts.append(f'it has called pause(): "{report.paused}"')
    if report.end:  # after it has answered
        where = f"{where}. It has ended since then: {report.end}"
    return f"{_name(report)} {'; '.join(parts)}{where}."


def _farewell(report: RankReport) -> str:
    """Return how a rank ended without an error."""
    if report.end:
        return f"has ended{' with' if report.end.startswith('exit code') else ':'} {report.end}"
    return "has come to the end of its program" if report.reason == "ended" else f"has left: {report.left}"


def _last(report: RankReport) -> Optional[ReportedOperation]:
    """Return the operation that a rank began last, in any channel."""
    found = [channel.operations[-1] for channel in report.channels if channel.operations]
    return max(found, key=lambda operation: operation.at, default=None)


def _name(report: RankReport) -> str:
    return f"Rank {report.rank} ({report.host})"


def _conclusions(
    reports: Mapping[int, RankReport], waits: Waits, quarrels: Sequence[Dispute], names_calls: bool
) -> List[str]:
    """Return which ranks disagree, and which ranks all the others wait for in the end."""
    found = [line for dispute in quarrels for line in _dispute_lines(dispute, len(reports))]
    if not found and any(MISMATCH in report.error[: len(UNCAUGHT + MISMATCH)] for report in reports.values()):
        found = ["They do not make the same calls."]
    disagree = bool(found)
    if names_calls:  # but not of which group they are
        found = [line for line in found if " in the group of " in line]
    if not waits:
        return found if disagree or len(reports) == 1 else ["No rank waits for another."]
    culprits = behind(waits)
    if culprits:
        waiting = sorted(rank for rank, others in waits.items() if others)
        verb = "waits" if len(waiting) == 1 else "wait"
        return [*found, f"{ranks_text(waiting).capitalize()} {verb} for {ranks_text(culprits)}."]
    if disagree:
        return found
    stuck = waiting_for_each_other(waits, [((rank,), others) for rank, others in waits.items()])
    if stuck:
        return [] if names_calls else [
            f"{ranks_text(sorted(stuck)).capitalize()} wait for each other: they do not make the same calls "
            "in the same order."
        ]
    gone = (rank for rank, report in reports.items() if has_failed(report) or _has_left(report))
    ended = sorted(rank for rank in gone if rank not in waits)
    if ended:
        others = ranks_text(sorted(waits))
        return [f"{ranks_text(ended).capitalize()} ended before that for which {others} waited was done."]
    return ["All ranks that answered have entered this operation: they wait for the network."]


def _dispute_lines(dispute: Dispute, size: int) -> List[str]:
    (usual, most), *others = dispute.sides
    members = dispute.channel.members
    group = f" in the group of {ranks_text(members)}" if len(members) != size else ""
    if len(most) == len(others[0][1]):
        parties = ranks_text(dispute.ranks).capitalize()
        calls = "; ".join(f"{ranks_text(ranks)}: {_call(operation)}" for operation, ranks in dispute.sides)
        return [f"{parties} do not make the same call{group}: {calls}."]
    return [
        f"{ranks_text(ranks).capitalize()} {'makes' if len(ranks) == 1 else 'make'} another call than "
        f"{ranks_text(most)}{group}: {_call(operation)} instead of {_call(usual)}."
        for operation, ranks in others
    ]


def _call(operation: ReportedOperation) -> str:
    return f"{operation.what} (op {operation.number}, {operation.place})"


# -- reports of ranks, from the JSON of flight records -----------------------------------------------

_RECORDING = ("/ringcomm/engine/stacks.py", "/ringcomm/job/flight_recorder.py")
_LIBRARIES = ("/site-packages/", "/dist-packages/")
_STANDARD = re.compile(r"/lib(64)?/python3[^/]*/|^<frozen|/python3\d*\.zip/")
_MANY = 1 << 16
_OPERATION = fields(
    {"op": whole(), "kind": str, "name": str, "what": str, "site": str, "state": str, "at": number()},
    {"set": whole(), "count": whole(), "moved": maybe(whole()), "peer": maybe(whole())},
)
_CHANNEL = fields(
    {"name": str, "ordered": flag, "members": items(whole(), _MANY), "operations": items(_OPERATION, _MANY)},
    {
        "sets": table(int, items(whole(), _MANY), _MANY), "paused": maybe(str),
        "messages": maybe(table(int, row(whole(), whole()), _MANY)),
    },
)  # fmt: skip
_THREAD = fields({"main": flag, "frames": items(row(str, maybe(whole()), str), _MANY)})
_RECORD = fields(
    {"type": one_of("record"), "format": one_of(1), "rank": whole(), "host": str, "reason": str},
    {
        **dict.fromkeys(("error", "end", "state", "left", "stacks"), str), "culprit": maybe(whole()),
        "generation": whole(), "lanes": items(_CHANNEL, _MANY), "threads": items(_THREAD, _MANY),
    },
)  # fmt: skip


def parse_record(data: bytes) -> Dict[str, Any]:
    """Return the JSON of a flight record; ValueError if it is not valid."""
    try:
        content = decoded(data, lambda value: value)  # read_report checks it
    except ProtocolError as problem:
        raise ValueError(str(problem)) from None
    if not isinstance(content, dict):
        raise ValueError("it is not a flight record")  # noqa: TRY004  as for all that is no record
    return content


def read_report(content: Any) -> RankReport:
    """Return the report in a record; ValueError if it is not a flight record of a known format."""
    found = _RECORD(content)
    main, blocked = _whereabouts(_main_frames(found))
    channels = found.get("lanes", ())
    same = ("rank", "host", "reason", "error", "culprit", "end", "state", "left")
    return RankReport(
        **{name: found[name] for name in same if name in found}, main=main, blocked=blocked,
        paused=next((it["paused"] for it in channels if it.get("paused")), ""),
        channels=tuple(map(_channel, channels)),
    )  # fmt: skip


def _channel(found: Mapping[str, Any]) -> ReportedChannel:
    counts = found.get("messages")
    make = _operation if counts is None else _message
    return ReportedChannel(
        found["name"], found["ordered"], tuple(found["members"]),
        {number: tuple(ranks) for number, ranks in found.get("sets", {}).items()},
        tuple(map(make, found["operations"])),
        None if counts is None else {rank: (sent, received) for rank, (sent, received) in counts.items()},
    )  # fmt: skip


def _operation(found: Mapping[str, Any]) -> ReportedOperation:
    kind, name = found["kind"], found["name"]
    return ReportedOperation(
        found["op"], f"{kind} `{name}`" if name else kind, (found.get("set", 0), name, found.get("count", 0)),
        found["what"], found["site"].rpartition("/")[2], found["state"], found.get("moved"), found["at"],
    )  # fmt: skip


def _message(found: Mapping[str, Any]) -> ReportedOperation:
    """Return an operation as a message: "message 5 from rank 0", with its purpose, length and place."""
    operation, peer = _operation(found), found.get("peer")
    way = "to" if found["kind"] == "send" else "from"
    label = f"message {operation.number} {way} {'any rank' if peer is None else f'rank {peer}'}"
    facts = (found["name"], operation.what, operation.place)
    return operation._replace(label=label, place=", ".join(filter(None, facts)), peer=peer)


def _main_frames(found: Mapping[str, Any]) -> List[Frame]:
    """Return the main thread's frames, innermost last."""
    for thread in found.get("threads", ()):
        if thread["main"]:
            return [(file, line or 0, function) for file, line, function in thread["frames"]]
    threads = list(stacks.parse(found.get("stacks", "")).frames.values())
    return threads[-1] if threads else []  # faulthandler writes the main thread last


def _whereabouts(frames: Sequence[Frame]) -> Tuple[str, bool]:
    """Return where the user's program is, and whether it waits in ringcomm there."""
    own = [index for index, (file, _, _) in enumerate(frames) if is_users(file)]
    if not own:
        if any(file.endswith(_RECORDING) for file, _, _ in frames):
            return "", False  # the program has failed, and is about to tell so
        # Python's frozen modules (the import system) are of no use in a stack.
        inner = [item for item in frames if not item[0].startswith("<frozen")]
        return (_frame_text(inner[-1]) if inner else ""), any("/ringcomm/" in item[0] for item in frames)
    text = _frame_text(frames[own[-1]])
    deeper = [file for file, _, _ in frames[own[-1] + 1 :]]
    if any("/ringcomm/" in file for file in deeper):
        return text, True
    library = next((file.rpartition(mark)[2] for file in deeper for mark in _LIBRARIES if mark in file), "")
    return f"{text}, inside {library}" if library else text, False


def is_users(file: str) -> bool:
    """Return whether a file belongs to the program, not to a library, Python or ringcomm."""
    inside = any(mark in file for mark in (*_LIBRARIES, "/ringcomm/", "/ringrun/"))
    return not inside and not _STANDARD.search(file)


def _frame_text(frame: Frame) -> str:
    file, line, function = frame
    place = f"{file.rpartition('/')[2]}:{line}"
    return place if function == "<module>" else f"{function} ({place})"
