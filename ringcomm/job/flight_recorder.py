"""What a rank has done: its counters, and the flight recorder with its last operations and threads' stacks.

Calls count themselves (:mod:`ringcomm.collective.observe`). The counters (:class:`Activity`) are for
``rc.stats()``, and for ringrun's live view and report: it requests the sums once a second on the socket of
the flight recorder, so a job that is not watched pays for counting only.

The call histories in the runner and the engine are always on. They are read when the job fails on this
rank, or when ringrun requests a record through a socket that the process has inherited. A thread waits on
that socket, so it answers whatever the main thread does. If a C call holds the interpreter lock, no thread
can answer; then ringrun sends SIGUSR1, and :mod:`faulthandler`, which needs no lock, writes the stacks to a
pipe (on the socket they could interrupt a record).
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence

from ..clock import Deadline, StepClock, monotonic
from ..collective.observe import KEPT, CallHistory, Progress, Row, Totals, longest
from ..collective.runner import Runner
from ..config import flight_channel_from_environment
from ..engine.engine import Engine
from ..errors import MismatchError, NotInitializedError, PeerLostError, RingcommError, describe_error
from ..storage.files import write_file
from ..storage.folders import own_folder

if TYPE_CHECKING:
    from ..group.point_to_point import MessageHistory

logger = logging.getLogger("ringcomm.job.flight_recorder")

OPERATIONS_SENT = 8  # operations in a report to ringrun: those that took the most time in total
_TEXT_CHARACTERS = 1000  # of the description of an operation, which has the names of its tensors
FORMAT = 1  # the version of the records
# requests of ringrun, each one byte: for a record, for the numbers of :class:`Activity`
RECORD, NUMBERS = b"?", b"#"
SEND_S = 2.0  # time limit for sending a record to ringrun
_ENDED_OPERATIONS = 20  # operations per channel in the record of a process that ends without an error


class Activity:
    """The numbers of one context, or of one process group, whose ``members`` are ranks of the whole job."""

    def __init__(
        self, runner: Runner, engine: Optional[Engine], members: Sequence[int],
        steps: Optional[StepClock] = None,
    ) -> None:  # fmt: skip
        self.steps = StepClock() if steps is None else steps  # while it is 0, repeated names count steps
        self.gauges: Dict[str, float] = {}  # other numbers by name, as they are at present
        self.messages: Optional[MessageHistory] = None  # point-to-point messages, if they are recorded
        self._runner, self._engine, self._members = runner, engine, members
        self._began_s = time.perf_counter()
        self._last: Optional[Dict[str, Any]] = None

    @property
    def waited_s(self) -> float:
        """Return the seconds that this rank spent in collectives and in waits for messages."""
        engine_s = 0.0 if self._engine is None else self._engine.waited_s
        messages_s = 0.0 if self.messages is None else self.messages.waited_s
        return self._runner.waited_s + engine_s + messages_s

    def totals(self) -> Totals:
        """Return the sums over all calls; peers are ranks of the whole job."""
        found = self._runner.totals()
        if self._engine is not None:
            found.merge(self._engine.buckets.totals())
        if self.messages is not None:
            self.messages.add_to(found)
        for links in (self._runner, None if self._engine is None else self._engine.buckets):
            for peer, (delivered_bytes, busy_s) in ({} if links is None else links.delivered()).items():
                found.peer(peer).delivered_bytes += delivered_bytes
                found.peer(peer).busy_s += busy_s
        found.peers = {self._members[rank]: peer for rank, peer in found.peers.items()}
        return found

    def conclude(self) -> None:
        """Keep the present numbers: the links are about to be closed."""
        if self._last is None:
            self._last = self.numbers()

    def numbers(self) -> Dict[str, Any]:
        """Return the numbers that :func:`report` sends."""
        if self._last is not None:
            return dict(self._last)
        totals = self.totals()
        steps, late_s = self.steps, {} if self._engine is None else self._engine.late_s
        if self._engine is not None and not steps.count:
            steps = self._engine.repeated
        return {
            "elapsed_s": round(time.perf_counter() - self._began_s, 6),
            "steps": steps.count, "step_s": steps.step_s, "mean_step_s": steps.mean_s,
            "waited_s": self.waited_s,
            "peers": {
                str(rank): [peer.sent_bytes, peer.received_bytes, peer.slept_s, peer.delivered_bytes,
                            peer.busy_s]
                for rank, peer in sorted(totals.peers.items())
            },
            "kinds": {
                kind: [total.runs, total.took_s, total.moved_bytes] for kind, total in totals.kinds.items()
            },
            "operations": {
                name[:_TEXT_CHARACTERS]: [total.runs, total.took_s, total.moved_bytes]
                for name, total in ((name, totals.operations[name])
                                    for name in longest(totals.operations, OPERATIONS_SENT))
            },
            "late": {str(self._members[rank]): seconds for rank, seconds in late_s.items()},
            "gauges": dict(self.gauges),
            **self._position(),
        }  # fmt: skip

    def _position(self) -> Dict[str, Any]:
        """Return the present or last call of this rank, and the ranks from which it waits to receive."""
        places = [self._runner.progress()]
        if self._engine is not None:
            places.append(self._engine.buckets.progress())
        waits = [] if self.messages is None else list(self.messages.waits())
        if waits:
            what, peer = waits[0]
            places.append(Progress(doing=what, waits_for=() if peer is None else (peer,)))
        inside = next((place for place in places if place.doing), None)
        doing = self._runner.last_call if inside is None else inside.doing
        waits_for = () if inside is None else inside.waits_for
        return {
            "doing": doing[:_TEXT_CHARACTERS], "inside": inside is not None,
            "waits_for": [self._members[rank] for rank in waits_for],
        }  # fmt: skip


def report(activities: Sequence[Activity]) -> Dict[str, Any]:
    """Return the numbers of a process's contexts and groups (at least one), ready for JSON."""
    parts = [activity.numbers() for activity in activities]
    whole = parts[0]
    for part in parts[1:]:
        for name in ("elapsed_s", "steps", "step_s", "mean_step_s"):
            whole[name] = max(whole[name], part[name])
        whole["waited_s"] += part["waited_s"]
        for name in ("peers", "kinds", "operations"):
            for key, values in part[name].items():
                before = whole[name].get(key, [0] * len(values))
                whole[name][key] = [one + other for one, other in zip(before, values)]
        whole["gauges"].update(part["gauges"])
        if part["inside"] or not whole["doing"]:
            whole.update({name: part[name] for name in ("doing", "inside", "waits_for")})
    return whole


def flat(numbers: Dict[str, Any]) -> Dict[str, float]:
    """Return :meth:`Activity.numbers` as numbers with one name each, for ``rc.stats()``."""
    names = ("steps", "step_s", "mean_step_s", "elapsed_s", "waited_s")
    found: Dict[str, float] = {f"ringcomm/{name}": numbers[name] for name in names}
    peers: List[Any] = list(numbers["peers"].values())
    found["ringcomm/calls"] = sum(runs for runs, _, _ in numbers["kinds"].values())
    found["ringcomm/sent_bytes"] = sum(peer[0] for peer in peers)
    found["ringcomm/received_bytes"] = sum(peer[1] for peer in peers)
    for rank, (sent, received, slept_s, *_) in numbers["peers"].items():
        found[f"ringcomm/rank_{rank}/sent_bytes"] = sent
        found[f"ringcomm/rank_{rank}/received_bytes"] = received
        found[f"ringcomm/rank_{rank}/waited_for_s"] = slept_s
    found.update({f"ringcomm/{name}": value for name, value in numbers["gauges"].items()})
    for kind, (runs, took_s, moved_bytes) in numbers["kinds"].items():
        found[f"ringcomm/{kind}/calls"] = runs
        found[f"ringcomm/{kind}/s"] = took_s
        found[f"ringcomm/{kind}/moved_bytes"] = moved_bytes
    return found


# ---- the flight recorder -------------------------------------------------------------------------


class GroupFacts(NamedTuple):
    """The rank and the group that records are about."""

    rank: int  # in the whole job
    size: int  # of the whole job
    host: str
    generation: int
    members: Sequence[int]  # ranks of the whole job
    channel: str = "calls"  # the name of the channel of direct calls in records


class FlightRecorder:
    """Read the call histories of one context, or of one process group."""

    def __init__(
        self, facts: GroupFacts, directory: str, runner: Runner, activity: Activity,
        engine: Optional[Engine] = None,
    ) -> None:  # fmt: skip
        self.facts = facts
        self.activity = activity
        self.closed = False
        self.messages: Optional[MessageHistory] = None  # point-to-point messages, if they are recorded
        self.left = ""  # the reason for closing, if that was no failure
        self._engine = engine
        self._directory = directory
        self._pid = os.getpid()
        self._reported = threading.Lock()  # taken by the first thread that reports, for ever
        self._runner = runner
        self._calls = runner.history = CallHistory(KEPT)
        self._calls.on_failure = self.failed
        if engine is not None and engine.history is not None:
            engine.history.on_failure = self.failed
        self._channel = RecorderSocket.of_this_process()
        if self._channel is not None:
            self._channel.add(self)

    def channels(self) -> List[Dict[str, Any]]:
        """Return the operations by channel; numbers are comparable between ranks if it is ``ordered``."""
        members = list(self.facts.members)
        found: List[Dict[str, Any]] = [{
            "name": self.facts.channel, "ordered": True, "members": members,
            "operations": [_dated(row) for row in self._runner.rows()],
        }]  # fmt: skip
        if self._engine is not None and self._engine.history is not None:
            history, process_sets = self._engine.history, self._engine.sets
            sets = {str(number): list(process_sets.members(number)) for number in process_sets.numbers()}
            rows = [_dated(row) for row in history.rows()]
            found.append({
                "name": "engine", "ordered": False, "members": members, "sets": sets, "operations": rows,
                "paused": history.paused,
            })  # fmt: skip
        if self.messages is not None:
            channel = self.messages.channel(f"messages of {self.facts.channel}", members)
            channel["operations"] = [_dated(row) for row in channel["operations"]]
            found.append(channel)
        return found

    def failed(self, error: BaseException) -> None:
        """Report a failure on this rank, once; leaving and interrupting are no failures."""
        if isinstance(error, NotInitializedError) or not isinstance(error, Exception):
            return
        self.report(f"{type(error).__name__}: {error}", error)

    def report(self, error: str, cause: Optional[BaseException] = None) -> None:
        """Send or write a record with this error and its exception, once."""
        if os.getpid() != self._pid or not self._reported.acquire(blocking=False):
            return
        if self._channel is not None:
            self._channel.send(record(self._channel.recorders, "failure", error, cause))
        elif self._directory and self.facts.size > 1:
            _write(Path(self._directory), record([self], "failure", error))

    def close(self, why: str, ok: bool, failure: Optional[RingcommError] = None) -> None:
        """Mark its context as closed; it stays part of records until the next context. ``failure`` is the
        earlier error that ended its communication; it is the cause if ``why`` contains its text.
        """
        self.activity.conclude()
        if ok:
            self.left = why
        else:
            self.report(why, failure if failure is not None and str(failure).rstrip(".") in why else None)
        self.closed = True
        # Break the reference cycle between histories and recorder, so that both are freed at once.
        self._calls.on_failure = None
        if self.messages is not None:
            self.messages.on_failure = None
        if self._engine is not None and self._engine.history is not None:
            self._engine.history.on_failure = None


def forget_what_is_closed() -> None:
    """Drop closed recorders, before this process joins another job."""
    channel = RecorderSocket.made_before()
    if channel is not None:
        channel.forget_closed()


def record(
    recorders: Sequence[FlightRecorder], reason: str, error: str = "", cause: Optional[BaseException] = None
) -> Dict[str, Any]:
    """Return a process's record, ready for JSON, with times of the wall clock. ``reason``: ``failure``,
    ``asked`` (by ringrun) or ``ended`` (then with fewer operations and no stacks).
    """
    culprit = cause.rank if isinstance(cause, (PeerLostError, MismatchError)) else None
    found: Dict[str, Any] = {
        "type": "record", "format": FORMAT, "reason": reason, "error": error, "culprit": culprit,
        "because": "" if cause is None else str(cause),
    }  # fmt: skip
    if recorders:
        facts = recorders[0].facts
        found.update(rank=facts.rank, size=facts.size, host=facts.host, generation=facts.generation)
        if all(recorder.left for recorder in recorders):
            found.update(left=recorders[-1].left)
    channels = [channel for recorder in recorders for channel in recorder.channels()]
    if reason == "ended":
        for channel in channels:
            channel["operations"] = channel["operations"][-_ENDED_OPERATIONS:]
    from ..engine.stacks import thread_stacks  # for a report, which most jobs never make

    threads = [] if reason == "ended" else thread_stacks()
    found.update(pid=os.getpid(), at=round(time.time(), 6), threads=threads, lanes=channels)
    return found


def numbers(recorders: Sequence[FlightRecorder]) -> Dict[str, Any]:
    """Return a process's numbers, ready for JSON; ``at`` is the wall clock in seconds."""
    facts = recorders[0].facts
    return {
        "type": "numbers", "at": round(time.time(), 6), "rank": facts.rank, "size": facts.size,
        "generation": facts.generation, **report([recorder.activity for recorder in recorders]),
    }  # fmt: skip


def _dated(row: Row) -> Row:
    """Return the row with ``at`` (wall clock) for ``began`` and, if it has ended, ``took`` (seconds)."""
    began_s, ended_s = row.pop("began"), row.pop("ended", None)
    row["at"] = round(time.time() - (monotonic() - began_s), 6)
    if ended_s is not None:
        row["took"] = round(ended_s - began_s, 6)
    return row


def _write(directory: Path, content: Dict[str, Any]) -> None:
    """Write a record to a file that only this user can read."""
    path = directory / f"flight.{content['rank']}.json"
    try:
        with own_folder(directory, 0o700) as folder:
            write_file(folder, path.name, json.dumps(content).encode())
    except OSError as problem:
        logger.warning("the flight record %s cannot be written: %s", path, problem.strerror)


class RecorderSocket:
    """This process's socket to ringrun's agent, with the thread that answers its requests for records."""

    _own: Optional[RecorderSocket] = None
    _opened = False
    _opening = threading.Lock()

    def __init__(self, sock: socket.socket, stacks: int) -> None:
        self.recorders: List[FlightRecorder] = []
        self._socket = sock
        self._socket.setblocking(False)
        self._sending = threading.Lock()
        self._listing = threading.Lock()
        self._pid = os.getpid()
        self._counted = False  # whether ringrun has asked for numbers
        is_free = _is_free(signal.SIGUSR1)
        if is_free:  # otherwise the program handles that signal
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
        self.send({"type": "hello", "signal": is_free})
        atexit.register(self._report_end)
        threading.Thread(target=self._answer, name="ringcomm-flight", daemon=True).start()

    @classmethod
    def of_this_process(cls) -> Optional[RecorderSocket]:
        """Return the socket that ringrun passed to this process, if any; the first call opens it."""
        with cls._opening:
            if not cls._opened:
                cls._opened = True
                given = flight_channel_from_environment()
                if given and all(_is_still(*item) for item in given):
                    (sock, _), (stacks, _) = given
                    os.set_inheritable(sock, False)
                    os.set_inheritable(stacks, False)
                    try:
                        cls._own = cls(socket.socket(fileno=sock), stacks)
                    except RuntimeError as problem:  # no more threads: what needs them tells the user
                        logger.warning("there is no flight record: %s", problem)
        return cls.made_before()

    @classmethod
    def made_before(cls) -> Optional[RecorderSocket]:
        """Return the socket that :meth:`of_this_process` opened earlier, if any."""
        return cls._own if cls._own is not None and cls._own._pid == os.getpid() else None

    def add(self, recorder: FlightRecorder) -> None:
        with self._listing:
            self.recorders = [*(item for item in self.recorders if not item.closed), recorder]

    def forget_closed(self) -> None:
        with self._listing:
            self.recorders = [item for item in self.recorders if not item.closed]

    def _answer(self) -> None:
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        while True:
            readable.poll()
            try:
                request = self._socket.recv(4096)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                return
            if not request:
                return  # ringrun has ended and will end this process
            if NUMBERS in request and self.recorders:
                self._counted = True
                self.send(numbers(self.recorders))
            if RECORD in request:
                self.send(record(self.recorders, "asked"))

    def _report_end(self) -> None:
        """Send a last record when the program ends: after this no thread answers requests."""
        if self._pid == os.getpid() and self.recorders:
            if self._counted:
                self.send(numbers(self.recorders))
            error = getattr(sys, "last_value", None)
            text = "" if error is None else f"uncaught {describe_error(error)}"
            self.send(record(self.recorders, "ended", text, error))

    def send(self, message: Dict[str, Any]) -> None:
        """Send a message to ringrun, within :data:`SEND_S`."""
        left = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        deadline = Deadline(SEND_S)
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        if not self._sending.acquire(timeout=SEND_S):
            return
        try:
            while left and not deadline.expired():
                try:
                    left = left[self._socket.send(left) :]
                except (BlockingIOError, InterruptedError):
                    writable.poll(deadline.remaining_s() * 1e3)
        except OSError as problem:
            logger.debug("ringrun does not receive the flight record: %s", problem)
        finally:
            self._sending.release()


def _is_still(descriptor: int, inode: int) -> bool:
    """Return whether a descriptor is still the one that the variable names."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return (stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode)) and found.st_ino == inode


def _is_free(signum: int) -> bool:
    """Return whether a signal is neither caught nor ignored in this process, in Python or in C."""
    if signal.getsignal(signum) != signal.SIG_DFL:
        return False
    try:
        status = Path("/proc/self/status").read_text("utf-8", "replace")  # its name may be cut anywhere
    except OSError:
        return True
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigCgt:", "SigIgn:"))]
    return not any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)
