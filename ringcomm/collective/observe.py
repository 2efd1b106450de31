"""What is recorded of a rank's calls: where they were made, their progress, the last of them, and totals.

It is always on, so a small message takes a short way through it: a list of references, a look at the clock,
and the place of the call. Plans count their own runs. Texts and sums are made only on request.
"""

from __future__ import annotations

import dis
import logging
import os
import sys
import threading
from collections import deque
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from ..clock import monotonic
from ..errors import ProtocolError
from ..ops import ReduceOp
from ..wire.signature import Signature

logger = logging.getLogger("ringcomm")

# ---- places in the user's program ----------------------------------------------------------------

Site = Tuple[CodeType, int]
"""A place as it is found, code and instruction: its text is made only when it is read.

It holds no frame, which would keep the caller's variables alive.
"""

_packages = [f"{Path(__file__).resolve().parent.parent}{os.sep}"]
_ours: Dict[str, bool] = {}
_THREADING = threading.__file__
_truncating: Set[str] = set()
_MAX_TRUNCATING = 4096


def look_through(package: ModuleType) -> None:
    """Exclude a package, or a module that is a single file, from the user's program that it calls for."""
    path = Path(package.__file__ or "").resolve()
    place = f"{path.parent}{os.sep}" if path.name == "__init__.py" else str(path)
    if package.__file__ and place not in _packages:
        _packages.append(place)
        _ours.clear()


def is_ours(filename: str) -> bool:
    """Return whether a file belongs to ringcomm, or to a package that calls it for the user."""
    known = _ours.get(filename)
    if known is None:
        known = _ours[filename] = str(Path(filename).resolve()).startswith(tuple(_packages))
    return known


def _outside(depth: int) -> FrameType:
    frame = sys._getframe(depth)
    while is_ours(frame.f_code.co_filename):
        caller = frame.f_back
        if caller is None or caller.f_code.co_filename == _THREADING:
            return frame
        frame = caller
    return frame


def find_frame(depth: int, known: List[Any]) -> FrameType:
    """Return the innermost frame outside ringcomm that led here, ``depth`` callers or more above. ``known``
    (:func:`nowhere` the first time) has depth and code of the last result, which is tried first.
    """
    try:  # a context manager would cost more than all the rest
        frame = sys._getframe(known[0])
        if frame.f_code is known[1]:
            return frame
    except ValueError:
        pass  # the stack is not that deep this time
    frame = _outside(depth + 1)
    known[:] = _depth_of(frame), frame.f_code
    return frame


def nowhere() -> List[Any]:
    """Return the initial ``known`` of a place: depth and code."""
    return [0, None]


def this_site() -> Site:
    """Return the innermost place outside ringcomm that led here."""
    frame = _outside(2)
    return frame.f_code, frame.f_lasti


def _depth_of(wanted: FrameType) -> int:
    """Return the depth of a frame, as the caller of this function would pass it to ``sys._getframe``."""
    depth = 0
    while sys._getframe(depth + 1) is not wanted:
        depth += 1
    return depth


def site_text(site: Site) -> str:
    """Return ``file:line``."""
    code, instruction = site
    found = code.co_firstlineno
    for offset, line in dis.findlinestarts(code):
        if offset > instruction:
            break
        found = line or found
    return f"{code.co_filename}:{found}"


def call_site(known: Optional[List[Any]] = None) -> str:
    """Return file and line of the caller's code that led here, at once. ``known``: see :func:`find_frame`."""
    frame = _outside(2) if known is None else find_frame(2, known)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def note_truncation(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Warn once per line of the program if it averages integers: the result is an integer as well."""
    if op != ReduceOp.AVERAGE or dtype.kind not in "iu":
        return
    site = call_site()
    if site not in _truncating and len(_truncating) < _MAX_TRUNCATING:
        _truncating.add(site)
        logger.warning(
            "%s: the average of integers (%s) is truncated to an integer; of 0 and 1 it is 0. Convert them "
            "to floating-point numbers first, or use op=Sum.",
            site, dtype.name,
        )  # fmt: skip


# ---- the last calls: the flight recorder's part in a runner --------------------------------------

Row = Dict[str, Any]
"""An operation as a record, ready for JSON.

``op`` (its number), ``kind``, ``name``, ``what`` (the call as a person would write it), ``site``
(``file:line``), ``state``, ``began`` (monotonic seconds), ``moved`` (bytes, where it is running or has
failed), ``error`` (where it has failed).
"""

KEPT = 1000
"""How many of its last operations a rank records, in each channel."""

SUBMITTED, RUNNING, DONE, FAILED = "submitted", "running", "done", "failed"
"""The states of an operation; ``submitted``: it waits for other ranks to submit it as well."""


class CallHistory:
    """The last operations of one runner, at most ``capacity``."""

    __slots__ = ("_calls", "_failure", "on_failure")

    def __init__(self, capacity: int) -> None:
        self._calls: Deque[Any] = deque(maxlen=capacity)
        self._failure: Optional[Row] = None
        self.on_failure: Optional[Callable[[BaseException], None]] = None  # called when an operation fails

    def begin(self, sequence: int, call: Any, site: Site) -> None:
        """Record that a call starts, which was made at this site."""
        self._calls.append((sequence, call, site, monotonic()))

    def fail(self, error: BaseException, moved_bytes: int) -> None:
        """Record that the call has failed. It is the last one: the streams have stopped in mid-message."""
        text = f"{type(error).__name__}: {error}"
        self._failure = {"state": FAILED, "moved": moved_bytes, "error": text}
        if self.on_failure is not None:
            self.on_failure(error)

    def rows(self, moved_bytes: Optional[int] = None) -> List[Row]:
        """Return all records, oldest first. For any thread. ``moved_bytes``: of a call that still runs."""
        rows: List[Row] = [
            {
                "op": sequence, "kind": call.verb, "name": call.name, "what": call.describe(),
                "site": site_text(site), "state": DONE, "began": began_s,
            }
            for sequence, call, site, began_s in list(self._calls)
        ]  # fmt: skip
        if rows and self._failure is not None:
            rows[-1].update(self._failure)
        elif rows and moved_bytes is not None:
            rows[-1].update(state=RUNNING, moved=moved_bytes)
        return rows


# ---- progress, as heartbeats report it -----------------------------------------------------------


class Progress(NamedTuple):
    """The progress of a rank in its collectives."""

    # Twice the number of the call that it is in, or was in last; the same on all ranks. Odd in a call of
    # some ranks that follows it and is not counted.
    sequence: int = 0
    moved_bytes: int = 0  # by that call here, both ways
    doing: str = ""  # the call, for people; empty between two calls
    waits_for: Tuple[int, ...] = ()  # ranks from which it was last seen waiting to receive
    exchanged: Tuple[Tuple[int, int, int], ...] = ()  # rank, bytes sent to it, and received from it
    # The one rank without which this rank cannot leave the call; -1: it needs every rank, -2: unknown.
    # Not in heartbeats.
    root: int = -2

    def with_peer(self, rank: int) -> Tuple[int, int]:
        """Return the bytes sent to and received from this rank."""
        return next(((sent, got) for peer, sent, got in self.exchanged if peer == rank), (0, 0))

    @property
    def number(self) -> int:
        """Return the number of the call, for people."""
        return self.sequence // 2

    def to_json(self) -> List[Any]:
        """Return the fields of a heartbeat."""
        return list(self[:-1])

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Progress:
        """Invert :meth:`to_json`; raises ProtocolError for anything else."""
        try:
            sequence, moved_bytes, doing, waits_for, exchanged = data
            return cls(
                int(sequence),
                int(moved_bytes),
                str(doing),
                tuple(int(rank) for rank in waits_for),
                tuple((int(rank), int(sent), int(received)) for rank, sent, received in exchanged),
            )
        except (TypeError, ValueError) as problem:
            raise ProtocolError(f"a heartbeat that says nothing about progress: {problem}") from None

    def describe(self) -> str:
        """Return text like ``allreduce(shape (8,), float32, op=Sum), call number 4, 96 bytes into it``."""
        if not self.doing:
            return ""
        return f"{self.doing}, call number {self.number}, {self.moved_bytes} bytes into it"


# ---- totals --------------------------------------------------------------------------------------


class PeerTotal:
    """The totals of one peer; ``delivered_bytes`` and ``busy_s`` are the system's for TCP connections."""

    __slots__ = ("delivered_bytes", "busy_s", "received_bytes", "sent_bytes", "slept_s")

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.delivered_bytes = 0
        self.slept_s = self.busy_s = 0.0

    def exchanged(self, sent_bytes: int, received_bytes: int) -> None:
        """Add to the sums."""
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes


class OperationTotal:
    """The totals of equal calls, or of calls of one kind."""

    __slots__ = ("moved_bytes", "runs", "took_s")

    def __init__(self) -> None:
        self.runs = self.moved_bytes = 0
        self.took_s = 0.0

    def add(self, runs: int, took_s: float, moved_bytes: int) -> None:
        """Add to the sums."""
        self.runs += runs
        self.took_s += took_s
        self.moved_bytes += moved_bytes


class Tally:
    """The calls for one purpose (``label``) of the engine, which runs equal plans for different tensors."""

    __slots__ = ("label", "_calls")

    def __init__(self, label: str) -> None:
        self.label = label
        # By the call's id: plans may be dropped.
        self._calls: Dict[int, Tuple[Signature, OperationTotal]] = {}

    def add(self, call: Signature, took_s: float) -> None:
        """Count one run of a call."""
        counted = self._calls.get(id(call))
        if counted is None:
            counted = self._calls[id(call)] = call, OperationTotal()
        counted[1].add(1, took_s, 0)

    def move(self, totals: Totals) -> None:
        """Count these calls under the label in the sums of operations, not under their own descriptions."""
        for call, own in list(self._calls.values()):
            before = totals.operations.get(call.describe())
            if before is None or before.runs <= 0:
                continue
            moved_bytes = before.moved_bytes * own.runs // before.runs
            totals.operations.setdefault(self.label, OperationTotal()).add(own.runs, own.took_s, moved_bytes)
            before.add(-own.runs, -own.took_s, -moved_bytes)
            if before.runs <= 0:
                del totals.operations[call.describe()]


class Totals:
    """Sums over calls."""

    def __init__(self) -> None:
        self.peers: Dict[int, PeerTotal] = {}  # by rank
        self.kinds: Dict[str, OperationTotal] = {}  # by kind, such as ``allreduce``
        self.operations: Dict[str, OperationTotal] = {}  # by the description of the call

    def merge(self, other: Totals) -> None:
        """Add the sums of another object."""
        for rank, item in list(other.peers.items()):
            self.peer(rank).exchanged(item.sent_bytes, item.received_bytes)
            self.peer(rank).slept_s += item.slept_s
        for mine, theirs in ((self.kinds, other.kinds), (self.operations, other.operations)):
            for name, total in list(theirs.items()):
                mine.setdefault(name, OperationTotal()).add(total.runs, total.took_s, total.moved_bytes)

    def peer(self, rank: int) -> PeerTotal:
        """Return the sums of the exchange with a rank."""
        return self.peers.setdefault(rank, PeerTotal())


def longest(operations: Dict[str, OperationTotal], count: int) -> List[str]:
    """Return the names of the operations that took the most time in total, at most ``count``."""
    return sorted(operations, key=lambda name: -operations[name].took_s)[:count]
