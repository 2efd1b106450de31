"""The timeline: what every rank did when, on one clock, as a Chrome trace.

Open the file in ``chrome://tracing`` or https://ui.perfetto.dev. Every tensor is a row of its own,
with a line per rank; the events have Horovod's names. The file is valid JSON after every
write, also if the job ends there. (Who reads it in the microseconds of a write reads again.)
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from pathlib import Path
from typing import IO, Any, Callable, Dict, List, Optional, Sequence, Set, Union

from .engine.engine import Engine
from .engine.heartbeat import Vigil
from .engine.observer import Observer, now_us
from .engine.single_rank import OwnTrace
from .errors import ConfigError, Misuse, RingcommError
from .files import open_named

logger = logging.getLogger("ringcomm")

FINISH_S = 5.0
"""How long rank 0, when it leaves, waits for others to leave: what they have collected may be on its way."""


class TraceFile:
    """A JSON array that is complete after every write.

    Args:
        path: is overwritten.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Union[str, Path]) -> None:
        try:
            self._file: IO[bytes] = open(open_named(path), "wb")  # noqa: SIM115 - open until close()
        except OSError as problem:
            raise ConfigError(f"The timeline {path} cannot be written: {problem.strerror}.") from None
        self._end = 0
        self._write(b"[\n", b"]\n")

    def add(self, events: Sequence[Dict[str, Any]]) -> None:
        """Append events."""
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        self._write((b",\n" if self._end > 2 else b"") + lines.encode(), b"\n]\n")

    def _write(self, body: bytes, tail: bytes) -> None:
        # The bracket that ends the array is overwritten by what follows, in the same write.
        self._file.seek(self._end)
        self._file.write(body + tail)
        self._file.flush()
        self._end += len(body)

    def close(self) -> None:
        """No more events."""
        self._file.close()


class Merger:
    """Turns the events of all ranks into those of a trace: tensors become processes, ranks threads.

    Args:
        hosts: of every rank.
        epoch_us: wall clock at the moment that is 0 in the trace.
    """

    def __init__(self, hosts: Sequence[str], epoch_us: int) -> None:
        self._hosts = hosts
        self._pids: Dict[str, int] = {}
        self._seen: Dict[int, Set[int]] = {}
        self._epoch_us = epoch_us

    def preamble(self) -> List[Dict[str, Any]]:
        """What stands first."""
        arguments = {"name": "ringcomm", "start_time_since_epoch_in_micros": self._epoch_us}
        return [{"name": "process_name", "ph": "M", "pid": 0, "args": arguments}]

    def convert(self, rank: int, events: Sequence[Sequence[Any]]) -> List[Dict[str, Any]]:
        """A rank's events as the trace has them, in microseconds."""
        made: List[Dict[str, Any]] = []
        for name, phase, activity, at_us, arguments in events:
            event: Dict[str, Any] = {"ph": phase, "ts": round(float(at_us), 1), "pid": 0, "tid": rank}
            if name:
                event["pid"] = self._pid(str(name), rank, made)
            if activity:
                event["name"] = activity
            if phase == "X":
                event["dur"] = 0
            elif phase == "i":
                event["s"] = "g"
            if arguments:
                event["args"] = arguments
            made.append(event)
        return made

    def _pid(self, name: str, rank: int, made: List[Dict[str, Any]]) -> int:
        pid = self._pids.get(name)
        if pid is None:
            pid = self._pids[name] = len(self._pids) + 1
            self._seen[pid] = set()
            made.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
            made.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        if rank not in self._seen[pid]:
            self._seen[pid].add(rank)
            label = f"rank {rank} ({self._hosts[rank]})"
            made.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": rank, "args": {"name": label}})
        return pid


class Timeline:
    """Rank 0's end: a thread that writes what all ranks send, so that no collective waits for a disk.

    Args:
        path: the file.
        hosts: of every rank.
        start_us: this rank's clock at the moment that becomes 0.
    """

    def __init__(self, path: Union[str, Path], hosts: Sequence[str], start_us: float) -> None:
        self._file = TraceFile(path)
        self._merger = Merger(hosts, time.time_ns() // 1000)
        self._start_us = start_us
        self._queue: queue.SimpleQueue[Optional[List[Dict[str, Any]]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queue.put(self._merger.preamble())
        self._thread = threading.Thread(target=self._write, name="ringcomm-timeline", daemon=True)
        self._thread.start()

    def take(self, rank: int, events: Sequence[Sequence[Any]]) -> None:
        """Events of a rank, with times on this rank's clock."""
        shifted = [[*event[:3], float(event[3]) - self._start_us, *event[4:]] for event in events]
        with self._lock:
            self._queue.put(self._merger.convert(rank, shifted))

    def _write(self) -> None:
        while True:
            events = self._queue.get()
            if events is None:
                return
            self._file.add(events)

    def close(self) -> None:
        """Write what is left, and end."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()


class Recording:
    """A rank's timeline, on and off.

    Args:
        engine: what is observed, and brings the events to rank 0.
        hosts: of every rank.
    """

    def __init__(self, engine: Union[Engine, Vigil, OwnTrace], hosts: Sequence[str]) -> None:
        self._engine = engine
        self._hosts = hosts
        self._timeline: Optional[Timeline] = None
        self._on = False

    def start(self, path: Union[str, Path], mark_cycles: bool = False) -> None:
        """See :meth:`ringcomm.Context.start_timeline`."""
        if self._on:
            raise Misuse("The timeline is being written already; stop_timeline() first.")
        if self._engine.rank == 0:
            self._timeline = Timeline(path, self._hosts, now_us())
        self._on = True
        self._engine.observe(
            Observer(mark_cycles), self._timeline.take if self._timeline is not None else None
        )

    def stop(self, meet: Callable[[], None]) -> None:
        """See :meth:`ringcomm.Context.stop_timeline`.

        Args:
            meet: returns when all ranks have called it, after what they had sent to rank 0 before.
        """
        if self._on:
            self._on = False
            self._engine.observe(None)
            meet()
            self.close()

    def finish(self) -> None:
        """This rank is about to leave: bring out what was collected, without a call that others must make."""
        if self._on:
            self._on = False
            try:
                self._engine.observe(None)
            except RingcommError as problem:
                logger.warning("The timeline of rank %d lacks its end: %s", self._engine.rank, problem)
                return
            self._engine.settle(FINISH_S)

    def close(self) -> None:
        """End the file, if it is still being written."""
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.close()
