"""The output of a job: its ranks' output as prefixed lines and as files, and ringrun's own messages."""

from __future__ import annotations

import re
from collections import deque
from typing import Container, Deque, Dict, List, Mapping, Optional, Sequence, Tuple

from ringcomm.clock import Clock

from ..diagnosis.tracebacks import ERRORS
from ..plan.job import Job
from .console import Console, OutputFiles
from .visible import visible, visible_line

STDOUT, STDERR = 1, 2
STATE_INTERVAL_S = 0.1
"""Minimum time between two states of progress bars at the bottom of a terminal."""
MAX_LINE_BYTES = 64 * 1024
PROGRESS_INTERVAL_S = 1.0
"""Time between two lines with the states of progress bars, of all ranks together."""
_REDRAWN = re.compile(rb"[\r\x08]")
_BACKSPACES = re.compile(rb"\x08+")
_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
HOLD_S = 2.0
TAIL_LINES, TAIL_BYTES = 200, 256 * 1024
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_TRACEBACK = b"Traceback (most recent call last):"
_TORCHS_PREFIX = re.compile(rb"\[rank\d+\]: ?")
_NATIVE_FRAME = re.compile(rb"(At:|\s+\S+\(\d+\): \S+)\s*$")
"""Lines after an error that passed through C++: ``At:``, then lines like ``  /a/file.py(12): function``."""


# -- lines of one stream ----------------------------------------------------------------------


class LineAssembler:
    """Splits one stream of one rank into lines.

    A line that is rewritten with carriage returns or backspaces (a progress bar) is shown about once in
    :attr:`interval_s` seconds in its latest state, and in its last state when it ends. A line longer than
    64 KiB is split. Bytes are not decoded. With `in_place` only the last state of a progress bar becomes a
    line; the others are shown by other means.
    """

    def __init__(self, in_place: bool = False) -> None:
        self.interval_s = PROGRESS_INTERVAL_S
        self.in_place = in_place
        self._line = bytearray()  # the bytes since the last line end or carriage return
        self._state: Optional[bytes] = None  # the last complete state of the line, if it is a progress bar
        self._shown = b""
        self._shown_s = float("-inf")

    @property
    def is_bar(self) -> bool:
        """Whether the current line is rewritten, so that :meth:`tick` may show it."""
        return self._state is not None

    def feed(self, data: bytes, now_s: float) -> List[bytes]:
        """Return the lines that are complete now, without their ends."""
        plain = self._state is None and not _REDRAWN.search(data) and b"\r" not in self._line
        if plain and len(data) <= MAX_LINE_BYTES:
            *lines, rest = (bytes(self._line) + data).split(b"\n")  # fast path for the usual case
            if len(rest) <= MAX_LINE_BYTES and (not lines or len(lines[0]) <= MAX_LINE_BYTES):
                self._line[:] = rest
                return lines
        lines = []
        *whole, rest = _BACKSPACES.sub(b"\r", data).split(b"\n")
        for part in whole:
            self._extend(part, lines)
            lines += self._finish()
        self._extend(rest, lines)
        return lines + self.tick(now_s)

    def tick(self, now_s: float) -> List[bytes]:
        """Return the state of a progress bar, if the last one was shown at least a second ago."""
        if self._state is None or self.in_place or now_s - self._shown_s < self.interval_s:
            return []
        state = self.state()
        if state == self._shown or not state:
            return []
        self._shown, self._shown_s = state, now_s
        return [state]

    def flush(self) -> List[bytes]:
        """Return the remaining bytes as a line at the end of the stream."""
        return self._finish() if self._line or self._state is not None else []

    def _extend(self, part: bytes, lines: List[bytes]) -> None:
        if b"\r" in part[:-1] or (part and self._line.endswith(b"\r")):
            *states, part = (bytes(self._line) + part).split(b"\r")
            del self._line[:]
            if not part:  # the \r may be half of a \r\n
                part = states.pop() + b"\r"
            visible = [state for state in states if state.strip()]
            if self._state is None:
                self._state = b""
            if visible:
                self._state = visible[-1]
        self._line += part
        while len(self._line) > MAX_LINE_BYTES:
            lines.append(bytes(self._line[:MAX_LINE_BYTES]))
            del self._line[:MAX_LINE_BYTES]

    def state(self) -> bytes:
        """Return the latest state of the current line; empty if there is none to show."""
        line = bytes(self._line.rstrip(b"\r"))
        return _CURSOR.sub(b"", line if line.strip() else self._state or b"").rstrip()

    def _finish(self) -> List[bytes]:
        if self._state is None:
            line = bytes(self._line.rstrip(b"\r"))
            del self._line[:]
            return [line]
        line = self.state()
        repeated = line == self._shown and not self.in_place
        self._state, self._shown = None, b""
        del self._line[:]
        return [] if repeated or not line else [line]


# -- streams of all ranks ---------------------------------------------------------------------


def without_torchs_prefix(line: bytes) -> bytes:
    """Return a line without the prefix that PyTorch adds to the lines of the last traceback."""
    found = _TORCHS_PREFIX.match(line) if line.startswith(b"[rank") else None
    return line if found is None else line[found.end() :]


class Tail:
    """The last lines of a stream, which contain the traceback."""

    def __init__(self, lines: int = TAIL_LINES, limit_bytes: int = TAIL_BYTES) -> None:
        self._lines: Deque[bytes] = deque(maxlen=lines)
        self._limit_bytes = limit_bytes
        self._bytes = 0

    def add(self, line: bytes) -> None:
        """Add a line. Lines of PyTorch's own stack are skipped, because they would displace the error."""
        line = without_torchs_prefix(line)
        if _NATIVE_FRAME.match(line):
            return
        if len(self._lines) == self._lines.maxlen:
            self._bytes -= len(self._lines.popleft())
        self._lines.append(line)
        self._bytes += len(line)
        while self._bytes > self._limit_bytes and len(self._lines) > 1:
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


def is_consequence(lines: List[bytes]) -> bool:
    """Return whether a traceback has another cause: Ctrl-C, or an error of ringcomm, which names it."""
    plain = [without_torchs_prefix(line) for line in lines]
    return plain[-1:] == [b"KeyboardInterrupt"] or any(line.startswith(ERRORS.encode()) for line in plain)


def _is_text(lines: List[bytes], text: Sequence[str]) -> bool:
    """Return whether lines are exactly this text."""
    decoded = [without_torchs_prefix(line).decode("utf-8", "replace").rstrip() for line in lines]
    return bool(text) and decoded == [line.rstrip() for line in text]


class TracebackDelay:
    """Delays a traceback on stderr.

    A rank that fails prints a traceback and ends. If it failed only because another rank did, its traceback
    would hide that of the root cause. So lines from the word Traceback on are delayed until the first failure
    is determined, or until the rank has continued for a while. A rank that is `ending` has reported the end
    of its program; its exit may take long.
    """

    def __init__(self) -> None:
        self._lines: List[bytes] = []
        self._since_s: Optional[float] = None
        self.ending = False

    @property
    def waiting(self) -> bool:
        """Whether lines are delayed."""
        return bool(self._lines)

    def add(self, lines: List[bytes], now_s: float) -> List[bytes]:
        """Add lines; return those that may be shown now."""
        shown: List[bytes] = []
        for line in lines:
            if not self._lines and without_torchs_prefix(line).startswith(_TRACEBACK):
                self._since_s = now_s
            if self._since_s is None:
                shown.append(line)
            else:
                self._lines.append(line)
                if len(self._lines) > TAIL_LINES:
                    shown += self.release()
        return shown

    def due(self, now_s: float) -> List[bytes]:
        """Return the delayed lines, if the time limit has passed and the rank continues."""
        if self._since_s is not None and now_s - self._since_s >= HOLD_S and not self.ending:
            return self.release()
        return []

    def keep(self) -> None:
        """Delay the lines of a failed rank until :meth:`release`, without a time limit."""
        if self._since_s is not None:
            self._since_s = float("inf")

    def release(self) -> List[bytes]:
        """Return all delayed lines, which are removed."""
        lines, self._lines, self._since_s = self._lines, [], None
        return lines


class Outputs:
    """The streams of all ranks: assemblers, prefixes, and the last lines of stderr (`tails`). `coloured`
    tells for stdout (1) and stderr (2) whether prefixes have colours; `in_place` are the streams that are
    terminals, with progress bars at the bottom.
    """

    def __init__(
        self, hosts: Dict[int, str], coloured: Mapping[int, bool], in_place: Container[int] = ()
    ) -> None:
        self._lines: Dict[Tuple[int, int], LineAssembler] = {}
        self._prefixes: Dict[Tuple[int, int], bytes] = {}
        self._delays: Dict[int, TracebackDelay] = {}
        self._coloured, self._in_place = coloured, in_place
        self.tails: Dict[int, Tail] = {}
        for rank, host in hosts.items():
            self.add(rank, host)

    def add(self, rank: int, host: str) -> None:
        for stream in (1, 2):
            self._lines[rank, stream] = LineAssembler(stream in self._in_place)
            self._prefixes[rank, stream] = prefix(host, rank, self._coloured[stream])
        self._delays[rank] = TracebackDelay()
        self.tails[rank] = Tail()

    def remove(self, rank: int) -> None:
        """Forget a rank that has ended."""
        for stream in (1, 2):
            del self._lines[rank, stream], self._prefixes[rank, stream]
        del self._delays[rank], self.tails[rank]

    def feed(self, rank: int, stream: int, data: bytes, now_s: float) -> bytes:
        """Return the bytes to write for data of a rank on stream 1 (stdout) or 2 (stderr)."""
        return self._compose(rank, stream, self._lines[rank, stream].feed(data, now_s), now_s)

    def ending(self, rank: int) -> None:
        """Delay the traceback of a rank that has reported its program's end until its exit code is known."""
        self._delays[rank].ending = True

    def flush(self, rank: int, ok: bool, now_s: float) -> List[Tuple[int, bytes]]:
        """Return the remaining output of a rank that has ended, as (stream, bytes)."""
        rest = [
            (stream, self._compose(rank, stream, self._lines[rank, stream].flush(), now_s))
            for stream in (1, 2)
        ]
        if ok:
            rest.append((2, self._prefixed(rank, 2, self._delays[rank].release())))
        else:
            self._delays[rank].keep()
        return rest

    def settle(self, shown: Container[int], reported: Sequence[str] = ()) -> List[Tuple[int, bytes]]:
        """Return the delayed lines of `shown` ranks, and of others without tracebacks that only name another
        rank as the root cause, or that the user reads elsewhere (`reported`).
        """
        delayed = [(rank, delay.release()) for rank, delay in self._delays.items()]
        return [
            (2, self._prefixed(rank, 2, lines))
            for rank, lines in delayed
            if lines and (rank in shown or not (is_consequence(lines) or _is_text(lines, reported)))
        ]

    def tick(self, now_s: float) -> List[Tuple[int, bytes]]:
        """Return states of progress bars that are due, and tracebacks of ranks that have continued."""
        shown = []
        bars = sum(assembler.is_bar for assembler in self._lines.values())
        for (rank, stream), assembler in self._lines.items():
            assembler.interval_s = PROGRESS_INTERVAL_S * max(1, bars)
            if assembler.is_bar:
                shown.append((stream, self._compose(rank, stream, assembler.tick(now_s), now_s)))
        for rank, delay in self._delays.items():
            if delay.waiting:
                shown.append((2, self._prefixed(rank, 2, delay.due(now_s))))
        return [(stream, data) for stream, data in shown if data]

    def state(self) -> Optional[Tuple[int, bytes]]:
        """Return (stream, line) for a terminal: the first progress bar and how many more; None if none."""
        bars = [
            (rank, stream, state)
            for (rank, stream), assembler in self._lines.items()
            for state in (assembler.state(),)
            if assembler.in_place and assembler.is_bar and state
        ]
        if not bars:
            return None
        rank, stream, state = bars[0]
        more = f" (and {len(bars) - 1} more)".encode() if len(bars) > 1 else b""
        return stream, self._prefixes[rank, stream] + state + more

    @property
    def waiting(self) -> bool:
        """Whether :meth:`tick` must be called soon."""
        return any(lines.is_bar for lines in self._lines.values()) or any(
            delay.waiting for delay in self._delays.values()
        )

    def _compose(self, rank: int, stream: int, lines: List[bytes], now_s: float) -> bytes:
        if stream == 2:
            for line in lines:
                self.tails[rank].add(line)
            lines = self._delays[rank].add(lines, now_s)
        return self._prefixed(rank, stream, lines)

    def _prefixed(self, rank: int, stream: int, lines: List[bytes]) -> bytes:
        start = self._prefixes[rank, stream]
        return b"".join([start + line + b"\n" for line in lines])


class Printer:
    """Writes output to the console with prefixes, and to ``--output-dir`` unchanged; ConfigError if that
    fails. `coloured` is by stream; `block` are lines at the bottom of a terminal, above progress bars.
    """

    def __init__(self, job: Job, console: Console, coloured: Mapping[int, bool], clock: Clock) -> None:
        hosts = {place.rank: job.hosts[place.host_index].name for place in job.plan.places}
        self.console, self._clock = console, clock
        self._outputs = Outputs(hosts, coloured, console.terminals)
        self._state: Optional[Tuple[int, Sequence[bytes]]] = None
        self.block: Sequence[bytes] = ()
        self._next_state_s = 0.0
        self._files: Optional[OutputFiles] = None
        if job.output_dir is not None:
            self._files = OutputFiles(job.output_dir, job.plan.size)

    def add(self, rank: int, host: str) -> None:
        """Add a rank to the job; ConfigError if its files in ``--output-dir`` cannot be written."""
        self._outputs.add(rank, host)
        if self._files is not None:
            self._files.add(rank)

    def remove(self, rank: int) -> None:
        """Forget a rank that has ended, with its last lines, and close its files."""
        self._outputs.remove(rank)
        if self._files is not None:
            self._files.remove(rank)

    @property
    def waiting(self) -> bool:
        """Whether :meth:`tick` must be called soon."""
        return self._outputs.waiting or bool(self.block)

    def tails(self) -> Dict[int, List[str]]:
        """Return the last lines on stderr, by rank."""
        return {rank: tail.text() for rank, tail in self._outputs.tails.items()}

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """Write a rank's output on stream 1 (stdout) or 2 (stderr)."""
        if rank in self._outputs.tails:
            if self._files is not None:
                self._files.write(rank, stream, data)
                if self._files.problem:
                    self.show(self._files.problem)
                    self._files.problem = ""
            self._write([(stream, self._outputs.feed(rank, stream, data, self._clock()))])

    def ending(self, rank: int) -> None:
        """Note the end of a rank's program, whose process has not exited yet."""
        if rank in self._outputs.tails:
            self._outputs.ending(rank)

    def ended(self, rank: int, ok: bool) -> None:
        """Write the rest of a rank's output after its process has ended."""
        self._write(self._outputs.flush(rank, ok, self._clock()))

    def tick(self) -> None:
        """Write delayed output that is due: progress bars and tracebacks."""
        self._write(self._outputs.tick(self._clock()))

    def settle(self, shown: Container[int], reported: Sequence[str] = ()) -> None:
        """Write delayed tracebacks; see :meth:`.Outputs.settle`."""
        self._write(self._outputs.settle(shown, reported))

    def show(self, text: str) -> None:
        """Write a message of ringrun to stderr; control characters become visible."""
        lines = [f"ringrun: {line}\n" for line in visible(text).splitlines()]
        self.console.write(STDERR, "".join(lines).encode())

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def _write(self, chunks: List[Tuple[int, bytes]]) -> None:
        for stream, data in chunks:
            if data:
                self.console.write(stream, data)
                self._state = None
        now_s = self._clock()
        if self.console.terminals and now_s >= self._next_state_s:
            state = self._lines_at_bottom()
            if state != self._state:
                self.console.show_state(*(state or (STDERR, ())))
                self._state, self._next_state_s = state, now_s + STATE_INTERVAL_S

    def _lines_at_bottom(self) -> Optional[Tuple[int, Sequence[bytes]]]:
        bars = self._outputs.state()
        if not self.block:
            return None if bars is None else (bars[0], [bars[1]])
        stream = STDERR if STDERR in self.console.terminals else STDOUT
        return stream, [*self.block, *([] if bars is None else [bars[1]])]
