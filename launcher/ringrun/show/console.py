"""Destinations of the output: descriptors of this process, its ``sys.stdout``, and files per rank."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Callable, Deque, Dict, Mapping, Optional, Sequence, Set, Tuple

from ringcomm.clock import Deadline
from ringcomm.errors import ConfigError
from ringcomm.storage.files import new_file, write_all
from ringcomm.storage.folders import inner_folder, own_folder

from .visible import COLOUR, cut

FULL_BYTES, ROOM_BYTES = 1 << 20, 1 << 18
_COLOUR = re.compile(f"({COLOUR.pattern})")


class Console:
    """Writes bytes to stream 1 (stdout) or 2 (stderr), by ``sys.stdout`` and ``sys.stderr``."""

    broken = False
    """Whether the output can no longer be written, for instance because the pipe's reader has ended."""

    problem = ""
    """The system's error if the output could not be written; "" for a closed pipe."""

    def coloured(self, environ: Mapping[str, str]) -> Dict[int, bool]:
        """Return by stream whether prefixes have colours (no-color.org)."""
        return {stream: stream in self.terminals and not environ.get("NO_COLOR") for stream in (1, 2)}

    def write(self, stream: int, data: bytes) -> None:
        """Write whole lines to stream 1 (stdout) or 2 (stderr), without blocking for long or raising."""
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
        except (OSError, ValueError):  # the pipe or the file is closed
            self.broken = True

    terminals: Sequence[int] = ()
    """The streams that are terminals, on which a line can be overwritten."""

    def show_state(self, stream: int, lines: Sequence[bytes]) -> None:
        """Show lines (without ends, cut to the width) at the bottom of a terminal until the next output."""

    @property
    def rows(self) -> int:
        """Height of the terminal, in lines."""
        return 24

    @property
    def full(self) -> bool:
        """Whether too much output is queued, so that the ranks' output must not be read now."""
        return False

    def on_change(self, wake: Callable[[], None]) -> None:
        """Set a function that is called, from any thread, when ``full`` or ``broken`` has changed."""

    def close(self, timeout_s: Optional[float] = None) -> None:
        """Wait until all queued output is written, at most `timeout_s` seconds; None: no limit."""


class DescriptorConsole(Console):
    """Writes to descriptors 1 and 2 from a separate thread, so that a slow reader blocks only that."""

    def __init__(self) -> None:
        self._queue: Deque[Tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = lambda: None
        self._was_full = False
        self._closing = False
        self._closed: Set[int] = set()
        has_cursor = os.environ.get("TERM", "") not in ("", "dumb")
        self.terminals = [stream for stream in (1, 2) if has_cursor and os.isatty(stream)]
        self._state_at: Optional[Tuple[int, int]] = None  # the stream and the number of lines shown
        self._thread = threading.Thread(target=self._run, name="ringrun-console", daemon=True)
        self._thread.start()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @property
    def full(self) -> bool:
        full = self._queued_bytes > (ROOM_BYTES if self._was_full else FULL_BYTES)
        self._was_full = full
        return full

    @property
    def rows(self) -> int:
        return _size(self.terminals[0]).lines if self.terminals else super().rows

    def show_state(self, stream: int, lines: Sequence[bytes]) -> None:
        self._clear_state()
        if lines:
            columns = _size(stream).columns
            self._put(stream, b"\n".join(cut_to_width(line, columns) for line in lines))
            self._state_at = stream, len(lines)

    def _clear_state(self) -> None:
        shown, self._state_at = self._state_at, None
        if shown is not None:
            stream, count = shown
            self._put(stream, b"\r\x1b[K" + b"\x1b[A\x1b[K" * (count - 1))

    def write(self, stream: int, data: bytes) -> None:
        if data:
            self._clear_state()
            self._put(stream, data)

    def _put(self, stream: int, data: bytes) -> None:
        if stream not in self._closed:
            with self._changed:
                self._queue.append((stream, data))
                self._queued_bytes += len(data)
                self._changed.notify_all()

    def close(self, timeout_s: Optional[float] = None) -> None:
        self._clear_state()
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
            except OSError as problem:  # a closed pipe or terminal, a full disk
                self._stop_writing(stream, problem)
                continue
            with self._changed:
                before = self._queued_bytes
                self._queued_bytes -= len(data)
                drained = before > ROOM_BYTES >= self._queued_bytes
            if drained:
                self._wake()

    def _stop_writing(self, stream: int, problem: OSError) -> None:
        """Drop further output of a stream; after a closed pipe, of both streams."""
        with self._changed:
            if problem.errno == errno.EPIPE:
                self._closed = {1, 2}
            else:
                self._closed.add(stream)
                name = "stdout" if stream == 1 else "stderr"
                self.problem = f"The output cannot be written to {name}: {problem.strerror}."
            self.broken = True
            left = [item for item in self._queue if item[0] not in self._closed]
            self._queue = deque(left)
            self._queued_bytes = sum(len(data) for _, data in left)
        self._wake()


def _size(stream: int) -> os.terminal_size:
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(stream)
        if size.columns and size.lines:  # a new pseudo-terminal has none
            return size
    return os.terminal_size((80, 24))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another process has made the terminal non-blocking
            select.select([], [descriptor], [], Deadline(1.0).remaining_s())


def cut_to_width(line: bytes, columns: int) -> bytes:
    """Return the beginning of a line that fits into a row of a terminal, with its colours and their end."""
    kept, room = [], max(1, columns - 1)
    for count, piece in enumerate(_COLOUR.split(line.decode("utf-8", "replace"))):
        if count % 2:
            kept.append(piece)
        else:
            shown, room = cut(piece, room)
            kept.append(shown)
    coloured = "\x1b[0m" if len(kept) > 1 else ""
    return ("".join(kept) + coloured).encode()


class OutputFiles:
    """``DIR/rank.N/stdout`` and ``stderr``: the unchanged output of each rank."""

    def __init__(self, folder: Path) -> None:
        self._files: Dict[Tuple[int, int], Tuple[Path, int]] = {}
        self._folder = folder

    def add(self, rank: int) -> None:
        """Create the files of a rank; ConfigError if that fails."""
        folder = at = self._folder
        try:
            with own_folder(folder) as top:  # each is opened once: it could be exchanged in between
                at = folder / f"rank.{rank}"
                with inner_folder(top, at.name, 0o777) as opened:
                    for stream, name in ((1, "stdout"), (2, "stderr")):
                        self._files[rank, stream] = at / name, new_file(opened, name, 0o666)
        except OSError as problem:
            self.close()
            raise ConfigError(
                f"--output-dir {folder}: {at} cannot be written: {problem.strerror}. "
                "Name a directory that you may write to."
            ) from None

    def remove(self, rank: int) -> None:
        """Close the files of a rank that has ended."""
        for stream in (1, 2):
            file = self._files.pop((rank, stream), None)
            if file is not None:
                os.close(file[1])

    def write(self, rank: int, stream: int, data: bytes) -> str:
        """Append to a rank's file. After an error, which is returned, no more is written to that file."""
        file = self._files.get((rank, stream))
        if file is not None:
            try:
                write_all(file[1], data)
            except OSError as problem:
                os.close(file[1])
                del self._files[rank, stream]
                return f"{file[0]}: {problem.strerror}; further output is not written to it."
        return ""

    def close(self) -> None:
        """Close all files."""
        for _, descriptor in self._files.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._files.clear()
