"""Where the output goes: this process's own stdout and stderr, a notebook's, and files per rank."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Callable, Deque, Dict, Mapping, Optional, Set, Tuple

from ringcomm.clock import Deadline
from ringcomm.errors import ConfigError
from ringcomm.files import new_file, own_folder

from .output import wants_colour

FULL_BYTES, ROOM_BYTES = 1 << 20, 1 << 18


class Console:
    """Takes bytes for stream 1 (stdout) or 2 (stderr). This base writes to ``sys.stdout`` and ``stderr``.

    A notebook replaces these with objects that take text only; others have a ``buffer``.
    """

    broken = False
    """Whether nobody reads any more."""

    problem = ""
    """What the system said when the output could not be written, if not that nobody reads it."""

    def coloured(self, environ: Mapping[str, str]) -> Dict[int, bool]:
        """For each stream, whether prefixes may have colours."""
        return {1: False, 2: False}

    def write(self, stream: int, data: bytes) -> None:
        """Show this. Never blocks for long, never raises."""
        target = sys.stdout if stream == 1 else sys.stderr
        try:
            buffer = getattr(target, "buffer", None)
            if buffer is not None:
                target.flush()
                buffer.write(data)
                buffer.flush()
            elif target is not None:
                target.write(data.decode("utf-8", "replace"))
                target.flush()
        except (OSError, ValueError):  # the pipe broke, or somebody closed the file
            self.broken = True

    @property
    def full(self) -> bool:
        """Whether writers should wait a while."""
        return False

    def on_change(self, wake: Callable[[], None]) -> None:
        """``wake`` will be called, from any thread, when ``full`` or ``broken`` has changed."""

    def close(self, timeout_s: Optional[float] = None) -> None:
        """Wait until everything is written, for so long at most."""


class DescriptorConsole(Console):
    """Writes to descriptors 1 and 2 from a thread of its own, so that a pager may take its time."""

    def __init__(self) -> None:
        self._queue: Deque[Tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = lambda: None
        self._was_full = False
        self._closing = False
        self._dead: Set[int] = set()
        self._thread = threading.Thread(target=self._run, name="ringrun-console", daemon=True)
        self._thread.start()

    def coloured(self, environ: Mapping[str, str]) -> Dict[int, bool]:
        return {stream: wants_colour(environ, os.isatty(stream)) for stream in (1, 2)}

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @property
    def full(self) -> bool:
        full = self._queued_bytes > (ROOM_BYTES if self._was_full else FULL_BYTES)
        self._was_full = full
        return full

    def write(self, stream: int, data: bytes) -> None:
        if data and stream not in self._dead:
            with self._changed:
                self._queue.append((stream, data))
                self._queued_bytes += len(data)
                self._changed.notify_all()

    def close(self, timeout_s: Optional[float] = None) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                stream, data = self._queue.popleft()
            try:
                _write_all(stream, data)
            except OSError as problem:  # a closed pipe, a terminal that is gone, a full disk
                self._give_up(stream, problem)
                continue
            with self._changed:
                before = self._queued_bytes
                self._queued_bytes -= len(data)
                drained = before > ROOM_BYTES >= self._queued_bytes
            if drained:
                self._wake()

    def _give_up(self, stream: int, problem: OSError) -> None:
        """Write no more there. Where nobody reads stdout, nobody wants to read stderr either."""
        with self._changed:
            if problem.errno == errno.EPIPE:
                self._dead = {1, 2}
            else:
                self._dead.add(stream)
                name = "stdout" if stream == 1 else "stderr"
                self.problem = f"The output cannot be written to {name}: {problem.strerror}."
            self.broken = True
            left = [item for item in self._queue if item[0] not in self._dead]
            self._queue = deque(left)
            self._queued_bytes = sum(len(data) for _, data in left)
        self._wake()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # somebody made the terminal non-blocking
            select.select([], [descriptor], [], Deadline(1.0).remaining_s())


class OutputFiles:
    """``DIR/rank.N/stdout`` and ``stderr``: every byte as the rank wrote it.

    Raises:
        ConfigError: the directory or a file in it cannot be made.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._files: Dict[Tuple[int, int], Tuple[Path, int]] = {}
        self.problem = ""
        try:
            with own_folder(folder):
                pass  # or it would be another user who decides what is below it
            for rank in range(ranks):
                place = folder / f"rank.{rank}"
                with own_folder(place) as opened:
                    for stream, name in ((1, "stdout"), (2, "stderr")):
                        self._files[rank, stream] = place / name, new_file(opened, name, 0o666)
        except OSError as problem:
            self.close()
            raise ConfigError(
                f"--output-dir {folder}: {problem.filename or folder} cannot be written: {problem.strerror}. "
                "Name a directory that you may write to."
            ) from None

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Append; when the disk says no, remember why in ``problem`` and leave that file."""
        file = self._files.get((rank, stream))
        if file is not None:
            try:
                os.write(file[1], data)
            except OSError as problem:
                self.problem = f"{file[0]}: {problem.strerror}; what follows is not kept there."
                os.close(file[1])
                del self._files[rank, stream]

    def close(self) -> None:
        """Close all files."""
        for _, descriptor in self._files.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._files.clear()
