"""The timeline: the operations of all ranks on one clock, as a Chrome trace.

Open the file in ``chrome://tracing`` or https://ui.perfetto.dev. Every tensor is a row with a line per rank;
the events have Horovod's names. The file is valid JSON after every write, also if the job ends there.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Union

from ..engine.observer import EventSource, Observer, now_us
from ..errors import ConfigError, Misuse, RingcommError
from ..storage.files import open_named

logger = logging.getLogger("ringcomm")

FINISH_S = 5.0  # longest wait of rank 0 for the last events of the other ranks when it leaves


class TraceFile:
    """A JSON array in a file that is complete after every write; ConfigError if it cannot be written."""

    def __init__(self, path: Union[str, Path]) -> None:
        try:
            # Without a buffer: what a full disk has refused would be written again when it is closed.
            self._file = open(open_named(path), "wb", buffering=0)  # noqa: SIM115 - open until close()
        except OSError as problem:
            raise _unwritable(path, problem) from None
        self._end = 0
        try:
            self._write(b"[\n", b"]\n")
        except OSError as problem:
            self._file.close()
            raise _unwritable(path, problem) from None

    def add(self, events: Sequence[Dict[str, Any]]) -> None:
        """Append events."""
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        self._write((b",\n" if self._end > 2 else b"") + lines.encode(), b"\n]\n")

    def _write(self, body: bytes, tail: bytes) -> None:
        # Each write overwrites the bracket that ended the array.
        self._file.seek(self._end)
        data = memoryview(body + tail)
        while data:
            data = data[self._file.write(data) :]
        self._end += len(body)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _unwritable(path: Union[str, Path], problem: OSError) -> ConfigError:
    return ConfigError(f"The timeline {path} cannot be written: {problem.strerror}.")


class Merger:
    """Convert the events of all ranks to trace events: tensors become processes, ranks threads.

    ``epoch_us`` is the wall clock at time 0 of the trace.
    """

    def __init__(self, hosts: Sequence[str], epoch_us: int) -> None:
        self._hosts = hosts
        self._pids: Dict[str, int] = {}
        self._seen: Dict[int, Set[int]] = {}
        self._epoch_us = epoch_us

    def preamble(self) -> List[Dict[str, Any]]:
        """Return the first events of the file."""
        arguments = {"name": "ringcomm", "start_time_since_epoch_in_micros": self._epoch_us}
        return [{"name": "process_name", "ph": "M", "pid": 0, "args": arguments}]

    def convert(self, rank: int, events: Sequence[Sequence[Any]]) -> List[Dict[str, Any]]:
        """Return a rank's events in the format of the trace, with times in microseconds."""
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
    """Write the events of all ranks on rank 0, in a thread, so that no collective waits for a disk.

    ``start_us`` is this rank's clock at time 0 of the trace.
    """

    def __init__(self, path: Union[str, Path], hosts: Sequence[str], start_us: float) -> None:
        self._path = path
        self._file = TraceFile(path)
        self._broken = False
        self._merger = Merger(hosts, time.time_ns() // 1000)
        self._start_us = start_us
        self._queue: queue.SimpleQueue[Optional[List[Dict[str, Any]]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queue.put(self._merger.preamble())
        self._thread = threading.Thread(target=self._write, name="ringcomm-timeline", daemon=True)
        self._thread.start()

    def take(self, rank: int, events: Sequence[Sequence[Any]]) -> None:
        """Add events of a rank, with times on this rank's clock."""
        if self._broken:
            return
        shifted = [[*event[:3], float(event[3]) - self._start_us, *event[4:]] for event in events]
        with self._lock:
            self._queue.put(self._merger.convert(rank, shifted))

    def _write(self) -> None:
        while True:
            batches = [self._queue.get()]
            while batches[-1] is not None and not self._queue.empty():
                batches.append(self._queue.get())
            events = [event for batch in batches if batch is not None for event in batch]
            try:
                if events:
                    self._file.add(events)
            except OSError as problem:
                self._give_up(problem)
                return
            if batches[-1] is None:
                return

    def _give_up(self, problem: OSError) -> None:
        """Drop all further events: training goes on without them."""
        logger.warning("The timeline %s is incomplete: %s.", self._path, problem.strerror)
        self._broken = True

    def close(self) -> None:
        """Write the remaining events, and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()


def timeline_path(path: str, epoch: int) -> str:
    """Return the file for one epoch of an elastic job, like ``trace-epoch1.json``.

    Epochs have separate files since another process may be rank 0, which writes them.
    """
    if not epoch:
        return path
    name = Path(path)
    return str(name.with_name(f"{name.stem}-epoch{epoch}{name.suffix}"))


class Recording:
    """Start and stop one rank's timeline; ``source`` is observed and sends the events to rank 0."""

    def __init__(self, source: EventSource, hosts: Sequence[str]) -> None:
        self._source = source
        self._hosts = hosts
        self._timeline: Optional[Timeline] = None
        self._on = False

    def start(self, path: Union[str, Path]) -> None:
        """Start writing to a file on rank 0.

        Misuse: a timeline is already being written. ConfigError: the file cannot be written.
        """
        if self._on:
            raise Misuse("A timeline is already being written; call stop_timeline() first.")
        if self._source.rank == 0:
            self._timeline = Timeline(path, self._hosts, now_us())
        self._on = True
        self._source.observe(Observer(), self._timeline.take if self._timeline is not None else None)

    def stop(self, meet: Callable[[], None]) -> None:
        """Complete the file after ``meet``, the barrier that brings the ranks' events to rank 0."""
        if self._on:
            self._on = False
            self._source.observe(None)
            meet()
            self.close()

    def finish(self) -> None:
        """Send the last events before this rank leaves, without a collective."""
        if self._on:
            self._on = False
            try:
                self._source.observe(None)
            except RingcommError as problem:
                logger.warning("The timeline of rank %d lacks its end: %s", self._source.rank, problem)
                return
            self._source.settle(FINISH_S)

    def close(self) -> None:
        """Close the file, if it is open."""
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.close()
