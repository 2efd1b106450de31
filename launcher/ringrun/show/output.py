"""The output of a job: its ranks' output as prefixed lines and as files, and ringrun's own messages."""

from __future__ import annotations

import re
from collections import deque
from typing import Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.clock import Clock

from ..diagnosis.failure_report import ERRORS
from ..plan.job import Job
from .console import Console, OutputFiles
from .visible import visible, visible_line

STDOUT, STDERR = 1, 2
MAX_LINE_BYTES = 64 * 1024
PROGRESS_INTERVAL_S = 1.0
"""Time between two lines with states of progress bars, of all ranks together, without a terminal."""
STATE_INTERVAL_S = 0.1
"""Minimum time between two states of progress bars at the bottom of a terminal."""
HOLD_S = 2.0
"""Time after which the traceback of a rank that continues is shown."""
TAIL_LINES, TAIL_BYTES = 200, 256 * 1024
_BACKSPACES = re.compile(rb"\x08+")
_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_TRACEBACK = b"Traceback (most recent call last):"
_TORCHS_PREFIX = re.compile(rb"\[rank\d+\]: ?")
_NATIVE_FRAME = re.compile(rb"(At:|\s+\S+\(\d+\): \S+)\s*$")
"""Lines after an error that passed through C++: ``At:``, then lines like ``  /a/file.py(12): function``."""


class LineAssembler:
    """Splits one stream of one rank into lines. A line that is rewritten with carriage returns or backspaces
    (a progress bar) becomes a line in its last state when it ends. A line longer than 64 KiB is split. Bytes
    are not decoded.
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
    """Writes output to the console with prefixes, and to ``--output-dir`` unchanged; ConfigError if that
    fails. `coloured` is by stream; `block` are lines at the bottom of a terminal, above the progress bar.

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
        """Show the held tracebacks, without those that only name another rank as the root cause, and without
        that of the rank `cause`, which the user reads elsewhere.
        """
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
        """Show tracebacks of ranks that have continued, and progress bars: the first one at the bottom of a
        terminal, elsewhere each once in a while.
        """
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
