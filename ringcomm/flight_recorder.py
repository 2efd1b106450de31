"""The flight recorder: what this rank did last and where its threads are, for whoever asks.

Its parts in the runner and the engine are always on. They are read when the job fails on this rank, or
when ringrun asks through a socket that the process has inherited. A thread sleeps at that socket, so
the answer comes whatever the main thread does. Should a C call keep the interpreter lock, no thread
can answer; then ringrun sends SIGUSR1, and :mod:`faulthandler`, which needs no lock, writes the stacks
to a pipe: on the socket they could come in the middle of an answer.
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
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from .clock import Deadline, monotonic
from .collective.call_history import CallJournal, Row
from .collective.runner import Runner
from .config import Settings, flight_channel_from_environment
from .engine.engine import Engine
from .engine.stacks import thread_stacks
from .errors import MismatchError, NotInitializedError, PeerLostError, RingcommError, describe_error
from .files import own_folder, write_file

logger = logging.getLogger("ringcomm.flight_recorder")

FORMAT = 1
"""The version of the records."""
SEND_S = 2.0
"""How long a record may take to get to ringrun."""
_FAREWELL = 20
"""How many operations a process that ends in peace tells of."""


class Facts(NamedTuple):
    """Whose records these are.

    Attributes:
        rank, size, host: in the whole job.
        generation: membership epoch.
        members: ranks of the whole job among which the operations are.
        lane: what the direct calls are called in records, if there are several sorts.
    """

    rank: int
    size: int
    host: str
    generation: int
    members: Sequence[int]
    lane: str = "calls"


class FlightRecorder:
    """Reads the journals of one context, or of one process group.

    Args:
        facts: whose they are.
        settings: ``flight_recorder`` says how many operations to keep, ``diagnose_dir`` where to write
            records if there is no ringrun to take them.
        runner: of the direct calls.
        engine: of those by name, if there is one.

    Attributes:
        closed: whether its context has been closed.
        left: why it was closed, if that was no failure.
    """

    def __init__(
        self, facts: Facts, settings: Settings, runner: Runner, engine: Optional[Engine] = None
    ) -> None:
        self.facts = facts
        self.closed = False
        self.left = ""
        self._engine = engine
        self._directory = settings.diagnose_dir
        self._pid = os.getpid()
        self._told = False
        self._runner = runner
        self._calls: Optional[CallJournal] = None
        self._channel: Optional[Channel] = None
        if settings.flight_recorder:
            self._calls = runner.journal = CallJournal(settings.flight_recorder)
            self._calls.on_failure = self.failed
            if engine is not None and engine.journal is not None:
                engine.journal.on_failure = self.failed
            self._channel = Channel.of_this_process()
            if self._channel is not None:
                self._channel.add(self)

    def lanes(self) -> List[Dict[str, Any]]:
        """The operations, by where they run: those of a lane that is ``ordered`` have comparable numbers."""
        found: List[Dict[str, Any]] = []
        members = list(self.facts.members)
        if self._calls is not None:
            rows = [_dated(row) for row in self._runner.rows()]
            found.append({"name": self.facts.lane, "ordered": True, "members": members, "operations": rows})
        if self._engine is not None and self._engine.journal is not None:
            journal, known = self._engine.journal, self._engine.sets
            sets = {str(number): list(known.members(number)) for number in known.numbers()}
            rows = [_dated(row) for row in journal.rows()]
            found.append({
                "name": "engine", "ordered": False, "members": members, "sets": sets, "operations": rows,
                "paused": journal.paused,
            })  # fmt: skip
        return found

    def failed(self, error: BaseException) -> None:
        """The job has failed on this rank: bring out what is known, the first time that this is called.

        Leaving, and what interrupts a program (Ctrl-C), are no failures.
        """
        if self._told or isinstance(error, NotInitializedError) or not isinstance(error, Exception):
            return
        self.tell(f"{type(error).__name__}: {error}", error)

    def tell(self, error: str, cause: Optional[BaseException] = None) -> None:
        """Bring out what is known, unless that has been done; ``error`` says why, ``cause`` is behind it."""
        if self._told or self._calls is None or os.getpid() != self._pid:
            return
        self._told = True
        if self._channel is not None:
            culprit = cause.rank if isinstance(cause, (PeerLostError, MismatchError)) else None
            because = {"culprit": culprit, "because": "" if cause is None else str(cause)}
            self._channel.send({**record(self._channel.recorders, "failure", error), **because})
        elif self._directory and self.facts.size > 1:
            _write(Path(self._directory), record([self], "failure", error))

    def close(self, why: str, ok: bool, failure: Optional[RingcommError] = None) -> None:
        """Its context has been closed, because of a failure if it is not ``ok``.

        Until there is another, what it did is still of interest.

        Args:
            failure: what has ended its communication before, if anything has. If ``why`` has the same words,
                the program ends because of that.
        """
        if ok:
            self.left = why
        else:
            self.tell(why, failure if failure is not None and str(failure).rstrip(".") in why else None)
        self.closed = True
        # Journals and recorder refer to each other no more, so what is closed is freed at once.
        if self._calls is not None:
            self._calls.on_failure = None
        if self._engine is not None and self._engine.journal is not None:
            self._engine.journal.on_failure = None


def forget_what_is_closed() -> None:
    """This process is about to join a job again: nothing that it did in an earlier one explains this one."""
    channel = Channel.made_before()
    if channel is not None:
        channel.forget_closed()


def record(recorders: Sequence[FlightRecorder], reason: str, error: str = "") -> Dict[str, Any]:
    """What a process knows, ready for JSON. Times are seconds of the wall clock.

    Args:
        reason: ``failure``, ``asked``, or ``ended``: the program has, and only a part is told.
    """
    found: Dict[str, Any] = {"type": "record", "format": FORMAT, "reason": reason, "error": error}
    if recorders:
        facts = recorders[0].facts
        found.update(rank=facts.rank, size=facts.size, host=facts.host, generation=facts.generation)
        if all(recorder.left for recorder in recorders):
            found.update(left=recorders[-1].left)
    lanes = [lane for recorder in recorders for lane in recorder.lanes()]
    if reason == "ended":
        for lane in lanes:
            lane["operations"] = lane["operations"][-_FAREWELL:]
    threads = [] if reason == "ended" else thread_stacks()
    found.update(pid=os.getpid(), at=round(time.time(), 6), threads=threads, lanes=lanes)
    return found


def _dated(row: Row) -> Row:
    """The row with ``at`` (wall clock) instead of ``began``; where the end is known, with ``took``."""
    began_s, ended_s = row.pop("began"), row.pop("ended", None)
    row["at"] = round(time.time() - (monotonic() - began_s), 6)
    if ended_s is not None:
        row["took"] = round(ended_s - began_s, 6)
    return row


def _write(directory: Path, content: Dict[str, Any]) -> None:
    """To a file of its own, for nobody else to read."""
    path = directory / f"flight.{content['rank']}.json"
    try:
        with own_folder(directory, 0o700) as folder:
            write_file(folder, path.name, json.dumps(content).encode())
    except OSError as problem:
        logger.warning("the flight record %s cannot be written: %s", path, problem.strerror)


class Channel:
    """This process's end of the socket to ringrun's agent, with the thread that answers there.

    Args:
        sock: is ours from now on.
        stacks: descriptor of the pipe that takes stacks; ours from now on.

    Attributes:
        recorders: whom to ask for what is known.
    """

    _own: Optional[Channel] = None
    _looked = False
    _making = threading.Lock()

    def __init__(self, sock: socket.socket, stacks: int) -> None:
        self.recorders: List[FlightRecorder] = []
        self._socket = sock
        self._stacks = stacks
        self._socket.setblocking(False)
        self._sending = threading.Lock()
        self._pid = os.getpid()
        self.send({"type": "hello", "signal": self._take_signal()})
        atexit.register(self._tell_the_end)
        threading.Thread(target=self._answer, name="ringcomm-flight", daemon=True).start()

    @classmethod
    def of_this_process(cls) -> Optional[Channel]:
        """The one that ringrun has given this process, if any."""
        with cls._making:
            if not cls._looked:
                cls._looked = True
                given = flight_channel_from_environment()
                if given and all(_is_still(*item) for item in given):
                    (sock, _), (stacks, _) = given
                    os.set_inheritable(sock, False)
                    os.set_inheritable(stacks, False)
                    cls._own = cls(socket.socket(fileno=sock), stacks)
        return cls.made_before()

    @classmethod
    def made_before(cls) -> Optional[Channel]:
        """The one that :meth:`of_this_process` has made earlier, if any."""
        return cls._own if cls._own is not None and cls._own._pid == os.getpid() else None

    def add(self, recorder: FlightRecorder) -> None:
        """There is another one to ask."""
        self.forget_closed()
        self.recorders = [*self.recorders, recorder]

    def forget_closed(self) -> None:
        """Those whose context has been closed are not asked any more."""
        self.recorders = [item for item in self.recorders if not item.closed]

    def _take_signal(self) -> bool:
        """Have SIGUSR1 write the stacks to the pipe, unless the program has a use for it."""
        if not _is_free(signal.SIGUSR1):
            return False
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True, chain=False)
        return True

    def _answer(self) -> None:
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        while True:
            readable.poll()
            try:
                asked = self._socket.recv(64)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                return
            if not asked:
                return  # ringrun is gone, and with it, soon, this process
            self.send(record(self.recorders, "asked"))

    def _tell_the_end(self) -> None:
        """The program ends. From here on no thread answers, and taking everything down may take long."""
        if self._pid == os.getpid() and self.recorders:
            error = getattr(sys, "last_value", None)
            text = "" if error is None else f"uncaught {describe_error(error)}"
            self.send(record(self.recorders, "ended", text))

    def send(self, message: Dict[str, Any]) -> None:
        """Bring a message to ringrun, if that takes it in time."""
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
            logger.debug("ringrun does not take the flight record: %s", problem)
        finally:
            self._sending.release()


def _is_still(descriptor: int, inode: int) -> bool:
    """Whether a descriptor is what the variable meant, and not something opened since."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return (stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode)) and found.st_ino == inode


def _is_free(signum: int) -> bool:
    """Whether nobody in this process catches or ignores a signal, in Python or in C."""
    if signal.getsignal(signum) != signal.SIG_DFL:
        return False
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return True
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigCgt:", "SigIgn:"))]
    return not any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)
