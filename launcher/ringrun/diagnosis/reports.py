"""A rank's report about itself: from the JSON of a flight record to the input of a diagnosis. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.engine import stacks
from ringcomm.engine.stacks import Frame
from ringcomm.errors import ProtocolError

from ..reach.incoming import fields, flag, items, json_of, maybe, number, one_of, row, table, whole

_RECORDING = ("/ringcomm/engine/stacks.py", "/ringcomm/job/flight_recorder.py")
_LIBRARIES = ("/site-packages/", "/dist-packages/")
_STANDARD = re.compile(r"/lib(64)?/python3[^/]*/|^<frozen|/python3\d*\.zip/")


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

    @property
    def over(self) -> bool:
        """Whether no rank waits in it any more."""
        return self.state == "done"

    def text(self) -> str:
        """Return ``allreduce `conv3.grad` (op 812, train.py:88)``, or ``message 5 from rank 0 (…)``."""
        number = "" if self.is_message else f"op {self.number}, "
        return f"{self.label} ({number}{self.place})"

    @property
    def is_message(self) -> bool:
        """Whether it sends or receives one message."""
        return self.label.startswith("message ")


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
    channels: Tuple[ReportedChannel, ...] = field(default=())


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
        content = json_of(data)
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
    texts = {name: found.get(name, "") for name in ("error", "end", "state", "left")}
    return RankReport(
        found["rank"], found["host"], found["reason"], culprit=found.get("culprit"), main=main,
        blocked=blocked, paused=next((it["paused"] for it in channels if it.get("paused")), ""),
        channels=tuple(map(_channel, channels)), **texts,
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
        found["what"], short_place(found["site"]), found["state"], found.get("moved"), found["at"],
    )  # fmt: skip


def _message(found: Mapping[str, Any]) -> ReportedOperation:
    """Return an operation as a message: "message 5 from rank 0", with its purpose, length and place."""
    operation, peer = _operation(found), found.get("peer")
    way = "to" if found["kind"] == "send" else "from"
    label = f"message {operation.number} {way} {'any rank' if peer is None else f'rank {peer}'}"
    facts = (found["name"], operation.what, operation.place)
    return operation._replace(label=label, place=", ".join(filter(None, facts)), peer=peer)


def short_place(site: str) -> str:
    """Return ``train.py:88`` for ``/home/me/train.py:88``."""
    return site.rpartition("/")[2]


def _main_frames(found: Mapping[str, Any]) -> List[Frame]:
    """Return the main thread's frames, innermost last."""
    for thread in found.get("threads", ()):
        if thread["main"]:
            return [(file, line or 0, function) for file, line, function in thread["frames"]]
    return faulthandlers_frames(found.get("stacks", ""))


def faulthandlers_frames(text: str) -> List[Frame]:
    """Return the main thread's frames in the output of :mod:`faulthandler`: the last thread, reversed."""
    threads = list(stacks.parse(text).frames.values())
    return threads[-1] if threads else []


def _whereabouts(frames: Sequence[Frame]) -> Tuple[str, bool]:
    """Return where the user's program is, and whether it waits in ringcomm there."""
    own = [index for index, (file, _, _) in enumerate(frames) if is_users(file)]
    if not own:
        if any(file.endswith(_RECORDING) for file, _, _ in frames):
            return "", False  # the program has failed, and is about to tell so
        # Python's frozen modules (the import system) are of no use in a stack.
        inner = next((item for item in reversed(frames) if not item[0].startswith("<frozen")), None)
        return (_frame_text(inner) if inner else ""), any(_is_ringcomms(item[0]) for item in frames)
    deeper = frames[own[-1] + 1 :]
    text = _frame_text(frames[own[-1]])
    if any(_is_ringcomms(file) for file, _, _ in deeper):
        return text, True
    library = next((_library_path(file) for file, _, _ in deeper if _library_path(file)), "")
    return f"{text}, inside {library}" if library else text, False


def _is_ringcomms(file: str) -> bool:
    return "/ringcomm/" in file


def is_users(file: str) -> bool:
    """Return whether a file belongs to the program, not to a library, Python or ringcomm."""
    inside = any(mark in file for mark in _LIBRARIES) or "/ringcomm/" in file or "/ringrun/" in file
    return not inside and not _STANDARD.search(file)


def _library_path(file: str) -> str:
    for mark in _LIBRARIES:
        if mark in file:
            return file.rpartition(mark)[2]
    return ""


def _frame_text(frame: Frame) -> str:
    file, line, function = frame
    place = short_place(f"{file}:{line}")
    return place if function == "<module>" else f"{function} ({place})"
