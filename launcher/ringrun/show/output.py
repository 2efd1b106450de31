"""The output of a job: its ranks' output as prefixed lines and as files, and ringrun's own messages; and its
destinations: descriptors of this process, its ``sys.stdout``, and files per rank.
"""

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
from typing import Callable, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ringcomm.clock import Clock, Deadline
from ringcomm.errors import ConfigError
from ringcomm.storage.files import new_file, write_all
from ringcomm.storage.folders import inner_folder, own_folder

from ..diagnosis.failure_report import ERRORS
from ..plan.job import Job
from .visible import COLOUR, cut, visible, visible_line

STDOUT, STDERR = 1, 2
MAX_LINE_BYTES = 64 * 1024
PROGRESS_INTERVAL_S = 1.0
"""Time between two lines with states of progress bars, of all ranks together, without a terminal."""
STATE_INTERVAL_S = 0.1  # between two states of progress bars at the bottom of a terminal
HOLD_S = 2.0  # after which the traceback of a rank that continues is shown
TAIL_LINES, TAIL_BYTES = 200, 256 * 1024
_BACKSPACES = re.compile(rb"\x08+")
_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_TRACEBACK = b"Traceback (most recent call last):"
_TORCHS_PREFIX = re.compile(rb"\[rank\d+\]: ?")
_NATIVE_FRAME = re.compile(rb"(At:|\s+\S+\(\d+\): \S+)\s*$")
"""Lines after an error that passed through C++: ``At:``, then lines like ``  /a/file.py(12): function``."""
FULL_BYTES, ROOM_BYTES = 1 << 20, 1 << 18
"""Queued bytes: above, ranks' output is not read; below, again."""
_COLOUR = re.compile(f"({COLOUR.pattern})")


# -- lines ------------------------------------------------------------------------------------


class LineAssembler:
    """Splits one stream of one rank into lines of at most 64 KiB. One that is rewritten with carriage returns
    or backspaces (a progress bar) becomes a line in its last state when it ends.
    """

    def __init__(self) -> None:
        self.is_bar = False  # the current line is rewritten
        self.shown, self.shown_s = b"", float("-inf")  # the last state that was shown as a line, and when
        # The bytes since the last line end; of a progress bar its last state, and what follows.
        self._line = bytearray()

    def feed(self, data: bytes) -> List[bytes]:
        """Return the lines that are complete now, without their ends."""
        lines: List[bytes] = []
        if self.is_bar or b"\r" in data or b"\x08" in data or self._line.endswith(b"\r"):
            *whole, rest = _BACKSPACES.sub(b"\r", data).split(b"\n")
            for part in whole:
                self._extend(part)
                lines += self.flush(ended=True)
            self._extend(rest)
        else:  # the usual case
            *lines, rest = (bytes(self._line) + data).split(b"\n")
            self._line[:] = rest
        if len(self._line) > MAX_LINE_BYTES:
            lines += self.flush()
        return lines

    def flush(self, ended: bool = False) -> List[bytes]:
        """Return the current line, if it has `ended` or is not empty."""
        line = self.state() if self.is_bar else bytes(self._line.rstrip(b"\r"))
        is_left_out = line in (b"", self.shown) if self.is_bar else not (ended or self._line)
        del self._line[:]
        self.is_bar, self.shown = False, b""
        return [] if is_left_out else [line]

    def _extend(self, part: bytes) -> None:
        self._line += part
        if b"\r" in self._line[:-1]:  # the last one may be half of a \r\n
            self.is_bar = True
            *states, rest = self._line.split(b"\r")
            self._line[:] = b"\r".join([*[state for state in states if state.strip()][-1:], rest])

    def state(self) -> bytes:
        """Return the latest state of a progress bar; empty if there is none to show."""
        states = [state for state in self._line.split(b"\r") if state.strip()]
        return _CURSOR.sub(b"", states[-1]).rstrip() if states else b""


def without_torchs_prefix(line: bytes) -> bytes:
    """Return a line without the prefix that PyTorch adds to the lines of the last traceback."""
    found = _TORCHS_PREFIX.match(line)
    return line if found is None else line[found.end() :]


def is_consequence(lines: Sequence[bytes]) -> bool:
    """Return whether a traceback has another cause: Ctrl-C, or an error of ringcomm, which names it."""
    plain = [without_torchs_prefix(line) for line in lines]
    return plain[-1:] == [b"KeyboardInterrupt"] or any(line.startswith(ERRORS.encode()) for line in plain)


class Tail:
    """The last lines of a stream, which contain the traceback."""

    def __init__(self) -> None:
        self._lines: Deque[bytes] = deque()
        self._bytes = 0

    def add(self, line: bytes) -> None:
        """Add a line. Lines of PyTorch's own stack are skipped, because they would displace the error."""
        line = without_torchs_prefix(line)
        if _NATIVE_FRAME.match(line):
            return
        self._lines.append(line)
        self._bytes += len(line)
        while len(self._lines) > TAIL_LINES or (self._bytes > TAIL_BYTES and len(self._lines) > 1):
            self._bytes -= len(self._lines.popleft())

    def text(self) -> List[str]:
        """Return the lines, decoded for a message."""
        return [line.decode("utf-8", "replace") for line in self._lines]


def prefix(host: str, rank: int, coloured: bool) -> bytes:
    """Return ``[host:rank] ``, in the rank's colour on a terminal."""
    text = f"[{visible_line(host)}:{rank}]"
    if coloured:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return text.encode() + b" "


class _Stream(NamedTuple):
    number: int  # 1 (stdout) or 2 (stderr)
    prefix: bytes
    lines: LineAssembler

    def prefixed(self, lines: Sequence[bytes]) -> bytes:
        return b"".join([self.prefix + line + b"\n" for line in lines])


class Printer:
    """Writes output to the console with prefixes, and to ``--output-dir`` unchanged. `coloured` is by stream;
    `block` are lines at the bottom of a terminal, above the progress bar.

    A rank that failed only because another one did prints a traceback, which would hide that of the root
    cause. So lines from the word Traceback on are held until the first failure is known (:meth:`settle`), or
    until the rank has continued for a while.
    """

    def __init__(self, job: Job, console: Console, coloured: Mapping[int, bool], clock: Clock) -> None:
        self.console, self._coloured, self._clock = console, coloured, clock
        self._files = None if job.output_dir is None else OutputFiles(job.output_dir)
        self._streams: Dict[int, Tuple[_Stream, _Stream]] = {}
        self._tails: Dict[int, Tail] = {}  # of stderr
        self._held: Dict[int, List[bytes]] = {}  # by rank, its traceback and what follows
        self._held_until_s: Dict[int, float] = {}  # of those that have not ended
        self.block: Sequence[bytes] = ()
        self._bottom: List[bytes] = []  # the lines at the bottom of the terminal
        self._next_bottom_s = 0.0
        for place in job.plan.places:
            self.add(place.rank, job.hosts[place.host_index].name)

    def add(self, rank: int, host: str) -> None:
        """Add a rank to the job; ConfigError if its files in ``--output-dir`` cannot be written."""
        out, err = (
            _Stream(stream, prefix(host, rank, self._coloured[stream]), LineAssembler())
            for stream in (STDOUT, STDERR)
        )
        self._streams[rank], self._tails[rank] = (out, err), Tail()
        if self._files is not None:
            self._files.add(rank)

    def remove(self, rank: int) -> None:
        """Forget a rank that has ended, with its last lines, and close its files."""
        self._release(rank)
        del self._streams[rank], self._tails[rank]
        if self._files is not None:
            self._files.remove(rank)

    @property
    def waiting(self) -> bool:
        """Whether :meth:`tick` must be called soon."""
        return bool(self.block or self._held_until_s or self._bars())

    def tails(self) -> Dict[int, List[str]]:
        """Return the last lines on stderr, by rank."""
        return {rank: tail.text() for rank, tail in self._tails.items()}

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """Write a rank's output on stream 1 (stdout) or 2 (stderr)."""
        if rank in self._streams:
            if self._files is not None:
                problem = self._files.write(rank, stream, data)
                self.show(problem)
            source = self._streams[rank][stream - 1]
            self._write(rank, source, source.lines.feed(data))

    def ended(self, rank: int, ok: bool) -> None:
        """Write the rest of a rank's output after its process has ended."""
        for source in self._streams[rank]:
            self._write(rank, source, source.lines.flush())
        self._held_until_s.pop(rank, None)
        if ok:
            self._release(rank)

    def settle(self, cause: Optional[int] = None) -> None:
        """Show the held tracebacks, except that of the rank `cause`, and those that name another rank."""
        known = self._held.get(-1 if cause is None else cause)
        for rank, lines in list(self._held.items()):
            if lines == known or is_consequence(lines):
                del self._held[rank]
            self._release(rank)

    def _write(self, rank: int, source: _Stream, lines: Sequence[bytes]) -> None:
        if source.number == STDERR:
            for line in lines:
                self._tails[rank].add(line)
            lines = self._not_held(rank, lines)
        self._put(source.number, source.prefixed(lines))

    def _not_held(self, rank: int, lines: Sequence[bytes]) -> Sequence[bytes]:
        """Hold a traceback and what follows; return the lines before it."""
        first = 0
        if rank not in self._held:
            starts = (i for i, line in enumerate(lines) if without_torchs_prefix(line).startswith(_TRACEBACK))
            first = next(starts, len(lines))
        if first < len(lines):
            self._held_until_s.setdefault(rank, self._clock() + HOLD_S)
            self._held.setdefault(rank, []).extend(lines[first:])
            if len(self._held[rank]) > TAIL_LINES:
                self._release(rank)
        return lines[:first]

    def _release(self, rank: int) -> None:
        """Show the held lines of a rank."""
        self._held_until_s.pop(rank, None)
        err = self._streams[rank][1]
        self._put(STDERR, err.prefixed(self._held.pop(rank, [])))

    def _put(self, stream: int, data: bytes) -> None:
        if data:
            self.console.write(stream, data)
            self._bottom = []

    def _bars(self) -> List[_Stream]:
        return [source for pair in self._streams.values() for source in pair if source.lines.is_bar]

    def tick(self) -> None:
        """Show tracebacks of ranks that have continued, and progress bars: on a terminal the first one."""
        now_s, bars = self._clock(), self._bars()
        for rank in [rank for rank, until_s in self._held_until_s.items() if until_s <= now_s]:
            self._release(rank)
        terminals, interval_s = self.console.terminals, PROGRESS_INTERVAL_S * len(bars)
        for bar in bars:
            lines, state = bar.lines, bar.lines.state()
            is_due = bar.number not in terminals and now_s >= lines.shown_s + interval_s
            if is_due and state not in (b"", lines.shown):
                lines.shown, lines.shown_s = state, now_s
                self._put(bar.number, bar.prefixed([state]))
        if terminals and now_s >= self._next_bottom_s:
            self._show_bottom([bar for bar in bars if bar.number in terminals], now_s)

    def _show_bottom(self, bars: Sequence[_Stream], now_s: float) -> None:
        shown = [bar for bar in bars if bar.lines.state()]
        stream = STDERR if STDERR in self.console.terminals else STDOUT
        lines = list(self.block)
        if shown:
            more = f" (and {len(shown) - 1} more)".encode() if len(shown) > 1 else b""
            lines.append(shown[0].prefix + shown[0].lines.state() + more)
            stream = stream if self.block else shown[0].number
        if lines != self._bottom:
            self.console.show_state(stream, lines)
            self._bottom, self._next_bottom_s = lines, now_s + STATE_INTERVAL_S

    def show(self, text: str) -> None:
        """Write a message of ringrun to stderr; control characters become visible."""
        lines = [f"ringrun: {line}\n" for line in visible(text).splitlines()]
        self._put(STDERR, "".join(lines).encode())

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


# -- destinations -----------------------------------------------------------------------------


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
