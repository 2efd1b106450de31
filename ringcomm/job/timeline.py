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
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

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
        self._file.close()


def _unwritable(path: Union[str, Path], problem: OSError) -> ConfigError:
    return ConfigError(f"The timeline {path} cannot be written: {problem.strerror}.")


class Timeline:
    """Write all ranks' events on rank 0, in a thread, so that no collective waits for a disk."""

    def __init__(self, path: Union[str, Path], hosts: Sequence[str], start_us: float) -> None:
        self._path = path
        self._file = TraceFile(path)
        self._broken = False
        self._hosts = hosts
        self._start_us = start_us
        self._pids: Dict[str, int] = {}
        self._seen: Set[Tuple[int, int]] = set()  # processes with their threads
        self._queue: queue.SimpleQueue[Optional[List[Dict[str, Any]]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        arguments = {"name": "ringcomm", "start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._queue.put([_metadata("process_name", 0, arguments)])
        self._thread = threading.Thread(target=self._write, name="ringcomm-timeline", daemon=True)
        self._thread.start()

    def take(self, rank: int, events: Sequence[Sequence[Any]]) -> None:
        """Add events of a rank, with times in microseconds on this rank's clock."""
        if self._broken:
            return
        with self._lock:
            made: List[Dict[str, Any]] = []
            for name, phase, activity, at_us, arguments in events:
                at = round(float(at_us) - self._start_us, 1)
                event: Dict[str, Any] = {"ph": phase, "ts": at, "pid": 0, "tid": rank}
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
            self._queue.put(made)

    def _pid(self, name: str, rank: int, made: List[Dict[str, Any]]) -> int:
        pid = self._pids.get(name)
        if pid is None:
            pid = self._pids[name] = len(self._pids) + 1
            made.append(_metadata("process_name", pid, {"name": name}))
            made.append(_metadata("process_sort_index", pid, {"sort_index": pid}))
        if (pid, rank) not in self._seen:
            self._seen.add((pid, rank))
            label = {"name": f"rank {rank} ({self._hosts[rank]})"}
            made.append({**_metadata("thread_name", pid, label), "tid": rank})
        return pid

    def _write(self) -> None:
        while True:
            events = self._queue.get()
            if events is None:
                return
            try:
                if events:
                    self._file.add(events)
            except OSError as problem:
                # Training goes on without the further events.
                logger.warning("The timeline %s is incomplete: %s.", self._path, problem.strerror)
                self._broken = True
                return

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._file.close()


def _metadata(name: str, pid: int, arguments: Dict[str, Any]) -> Dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "args": arguments}


def timeline_path(path: str, epoch: int) -> str:
    """Return the file for one epoch, like ``trace-epoch1.json``, as another process may write the next."""
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
        """Start writing to a file on rank 0. Misuse if it is being written; ConfigError if it cannot be."""
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
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.close()
