"""The decoder of all data from hosts: form, size, count, and permitted ranks. Pure.

A host may be compromised. Its data passes here before other code sees it: an agent's frames by
:class:`Incoming`, answers to the doctor and to ``ringrun clean`` by :func:`decoded`. A *form* is a function
that returns a value as the launcher uses it, or raises ValueError. Free text of a host comes out quoted, so
that it cannot be taken for a sentence, a line or a command of ringrun.
"""

from __future__ import annotations

import json
import re
from typing import Any, Callable, Collection, Dict, Mapping, Optional, Tuple

from ringcomm.clock import Clock
from ringcomm.errors import ProtocolError

from ..agent import framing
from ..agent.checks import PROVISIONED
from .base import quoted
from .protocol import Frame

Form = Callable[[Any], Any]
RESULT_BYTES = 1 << 30  # of all results of one host
BURST_BYTES, RANK_BURST_BYTES, BYTES_PER_S = 64 << 20, 8 << 20, 1 << 20
"""Limits of a host's reports besides output and files: at once, plus per rank; per second and rank."""
MIN_FRAME_BYTES = 4096  # a shorter frame counts as this size


# -- forms ------------------------------------------------------------------------------------------------


def _form(holds: Callable[[Any], bool], inner: Form = lambda value: value) -> Form:
    """Return the form of a value for which `holds` is true, as `inner` returns it."""

    def form(value: Any) -> Any:
        if not holds(value):
            raise ValueError(_shown(value))
        return inner(value)

    return form


def whole(low: int = 0, high: int = 1 << 53) -> Form:
    """Return the form of a whole number within bounds."""
    return _form(lambda value: type(value) is int and low <= value <= high)


def number(low: float = -1e18, high: float = 1e18) -> Form:
    """Return the form of a finite number within bounds."""
    return _form(lambda value: type(value) in (int, float) and low <= value <= high, float)


amount = number(0.0)
"""A number that is not negative."""
flag = _form(lambda value: type(value) is bool)


def text(limit: int = 4096, pattern: str = "(?s:.*)") -> Form:
    """Return the form of a text of at most `limit` characters that matches `pattern` fully."""
    compiled = re.compile(pattern, re.ASCII)
    return _form(
        lambda value: isinstance(value, str) and len(value) <= limit and bool(compiled.fullmatch(value))
    )


def said(limit: int = 4096) -> Form:
    """Return the form of free text, quoted unless it is empty."""
    inner = text(limit)
    return lambda value: quoted(inner(value)) if value != "" else ""


def one_of(*values: Any) -> Form:
    """Return the form of one of these values."""
    return _form(lambda value: isinstance(value, (str, int)) and value in values)


def maybe(inner: Form) -> Form:
    """Return the form of `inner` or null."""
    return lambda value: None if value is None else inner(value)


def items(inner: Form, limit: int) -> Form:
    """Return the form of a list with at most `limit` items."""
    return _form(
        lambda value: isinstance(value, list) and len(value) <= limit,
        lambda value: [inner(item) for item in value],
    )


def row(*inner: Form) -> Form:
    """Return the form of a list with one value of each form."""
    return _form(
        lambda value: isinstance(value, list) and len(value) == len(inner),
        lambda value: [each(item) for each, item in zip(inner, value)],
    )


def table(name: Form, inner: Form, limit: int) -> Form:
    """Return the form of an object with at most `limit` names of one form and values of another."""
    return _form(
        lambda value: isinstance(value, dict) and len(value) <= limit,
        lambda value: {name(key): _named(key, inner, item) for key, item in value.items()},
    )


def fields(wanted: Mapping[str, Form], more: Optional[Mapping[str, Form]] = None) -> Form:
    """Return the form of an object with the fields `wanted` and perhaps `more`; others are dropped."""
    known = {**(more or {}), **wanted}

    def form(value: Any) -> Dict[str, Any]:
        missing = [name for name in wanted if name not in value]
        if missing:
            raise ValueError(f"no {', '.join(missing)}")
        return {name: _named(name, inner, value[name]) for name, inner in known.items() if name in value}

    return _form(lambda value: isinstance(value, dict), form)


def _named(name: str, inner: Form, value: Any) -> Any:
    try:
        return inner(value)
    except ValueError as problem:
        raise ValueError(f"{_shown(name)}: {problem}") from None


def _shown(value: Any) -> str:
    return ascii(value)[:60]


def decoded(data: bytes, form: Form) -> Any:
    """Return JSON of a host in a form; ProtocolError if it is not JSON, or does not have the form."""
    try:
        return form(json.loads(data.decode(), parse_constant=_no_number, parse_int=_integer))
    except RecursionError:
        raise ProtocolError("nested too deeply") from None
    except ValueError as problem:
        raise ProtocolError(str(problem)) from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _integer(digits: str) -> int:
    if len(digits) > 20:  # Python needs quadratic time for long ones
        raise ValueError("a number with too many digits")
    return int(digits)


# -- agents' reports --------------------------------------------------------------------------------------

_VERSION = text(12, r"\d{1,2}(\.\d{1,3}){1,2}")
_PATH, _WHY = said(8192), said(8192)
_MODULES = one_of(*PROVISIONED, "ringcomm", "ringrun")
_OTHER_VERSION = maybe(said(100))
_FOUND = {
    "python": maybe(_PATH), "version": _VERSION, "old": flag, "missing": _MODULES, "why": _WHY,
    "lacks": items(_MODULES, 8), "ringcomm": _OTHER_VERSION, "ringcomm_at": maybe(_PATH),
}  # fmt: skip


def _found(*names: str) -> Form:
    """Return the form of a trial import's result, with at least these facts."""
    return fields({name: _FOUND[name] for name in names}, _FOUND)


def _unbound(value: Any) -> str:
    why: str = text(400)(value)
    return why and quoted(why)


_CODE, _SIGNAL = maybe(whole(0, 255)), maybe(whole(1, 64))
_HOW = {"code": _CODE, "signal": _SIGNAL, "sent": whole(0, 64)}
_PROBLEMS: Dict[str, Form] = {
    **dict.fromkeys(("cwd", "interpreter", "program", "script", "shadow"), fields({"path": _PATH})),
    **dict.fromkeys(("package", "start", "write"), fields({"path": _PATH, "why": _WHY})),
    "check": fields({"path": _PATH, "text": text(8192), **_HOW}),
    "old": fields({"path": _PATH, "found": _found("version")}),
    "missing": fields({"path": _PATH, "found": _found("missing", "why")}),
    "bytecode": fields({"path": _PATH, "found": _found("version"), "wanted": _VERSION}),
    "version": fields({"path": _PATH, "found": _found("ringcomm"), "wanted": said(100)}),
}
"""The form of a problem's report by its kind (:mod:`ringrun.agent.checks`)."""
_DIGEST = text(32, r"[0-9a-f]{32}")
_EVENTS: Dict[str, Form] = {
    "ready": fields(
        {
            "limits": fields(
                {
                    "threads": whole(0, 1 << 20), "cores": amount, "ranks": whole(0, 1 << 20),
                    "kept": table(text(60, r"\w+"), said(200), 100), "unbound": _unbound,
                }
            ),
            "port": whole(1, 65535),
        },
        {"login": text(200, r"[\w.:% ]*"), "found": _found("python", "version")},
    ),
    "problem": lambda value: _problem(value),
    "done": fields({}), "asked": fields({}), "lacks": fields({}, {"files": items(_DIGEST, 1 << 17)}),
    "needs": fields(
        {
            "found": fields({}, _FOUND), "machine": text(32, r"\w{1,32}"),
            "glibc": text(6, r"(\d{1,2}\.\d{1,3})?"),
        }
    ),
    "exit": fields(_HOW, {"joined": flag}), "started": fields({"pid": whole(1)}),
}  # fmt: skip
_OF_RANKS = ("exit", "started")
_TIMES = {"ready": 1, "needs": 1, "lacks": 2, "lacks files": 2, "done": 1, "exit": 1, "started": 1}
"""Maximum number of an event per host or rank; others are limited by the budget of bytes."""


def _problem(value: Any) -> Dict[str, Any]:
    kind = fields({"problem": one_of(*_PROBLEMS)})(value)["problem"]
    return {"problem": kind, **_PROBLEMS[kind](value)}


def event_facts(data: bytes) -> Dict[str, Any]:
    """Return the content of an event frame, its name as ``event``; ProtocolError if it is not valid."""

    def form(value: Any) -> Dict[str, Any]:
        name = fields({"event": one_of(*_EVENTS)})(value)["event"]
        return {"event": name, **_named(name, _EVENTS[name], value)}

    try:
        return dict(decoded(data, form))
    except ProtocolError as problem:
        raise ProtocolError(f"an invalid event: {problem}") from None


class Incoming:
    """The data that one host of a job has sent so far, and its remaining budget."""

    def __init__(self, wants_results: bool, clock: Clock) -> None:
        self._wants_results, self._clock = wants_results, clock
        self._counts: Dict[Tuple[str, int], int] = {}
        self._result_bytes, self._used_bytes, self._at_s = 0, 0.0, clock()

    def admit(self, frame: Frame, ranks: Collection[int]) -> Dict[str, Any]:
        """Check a frame's rank, number and size; return the facts of an event, otherwise {}."""
        of_host = frame.rank == -1 and frame.kind in (framing.EVENT, framing.FILE)
        if not of_host and (frame.rank not in ranks or frame.kind == framing.FILE):
            raise ProtocolError(f"it reports on rank {frame.rank}, which does not run there")
        if frame.kind == framing.RESULT:
            self._take_result(len(frame.data))
        elif frame.kind in (framing.EVENT, framing.RECORD, framing.NUMBERS):
            self._spend(max(MIN_FRAME_BYTES, len(frame.data)), 1 + len(ranks))
        return self._event(frame) if frame.kind == framing.EVENT else {}

    def _take_result(self, size: int) -> None:
        self._result_bytes += size
        if not self._wants_results:
            raise ProtocolError("a result, which this job does not ask for")
        if self._result_bytes > RESULT_BYTES:
            raise ProtocolError(
                f"results of more than {RESULT_BYTES >> 20} MiB; functions that return more can write files"
            )

    def _spend(self, size: int, ranks: int) -> None:
        now_s = self._clock()
        self._used_bytes = max(0.0, self._used_bytes - (now_s - self._at_s) * ranks * BYTES_PER_S) + size
        self._at_s = now_s
        if self._used_bytes > BURST_BYTES + ranks * RANK_BURST_BYTES:
            raise ProtocolError(f"more than {BURST_BYTES >> 20} MiB of reports within a short time")

    def _event(self, frame: Frame) -> Dict[str, Any]:
        facts = event_facts(frame.data)
        name = facts["event"]
        if (frame.rank < 0) is (name in _OF_RANKS):
            raise ProtocolError(f"an event {name!r} of rank {frame.rank}")
        key = ("lacks files" if "files" in facts else name), frame.rank
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] > _TIMES.get(key[0], self._counts[key]):
            raise ProtocolError(f"an event {name!r} once more than it may occur")
        if name == "exit" and (facts["code"] is None) is (facts["signal"] is None):
            raise ProtocolError("an end with a code and a signal, or with neither")
        return facts
