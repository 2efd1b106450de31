"""Formats the output of ranks. Pure: from chunks of bytes to whole lines with a prefix."""

from __future__ import annotations

import re
from collections import deque
from typing import Container, Deque, Dict, List, Mapping, Optional, Sequence, Tuple

from ..diagnosis.tracebacks import ERRORS
from .lines import PROGRESS_INTERVAL_S, LineAssembler
from .visible import COLOUR, cut, visible_line

HOLD_S = 2.0
TAIL_LINES, TAIL_BYTES = 200, 256 * 1024

_COLOUR = re.compile(f"({COLOUR.pattern})")
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_TRACEBACK = b"Traceback (most recent call last):"
_TORCHS_PREFIX = re.compile(rb"\[rank\d+\]: ?")


_NATIVE_FRAME = re.compile(rb"(At:|\s+\S+\(\d+\): \S+)\s*$")
"""Lines after an error that passed through C++: ``At:``, then lines like ``  /a/file.py(12): function``."""


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


def uses_colour(environ: Mapping[str, str], is_terminal: bool) -> bool:
    """Return whether to use colours: on a terminal, without ``NO_COLOR`` and ``TERM=dumb`` (no-color.org)."""
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM", "") != "dumb"


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
        """Return the remaining output of a rank that has ended, as (stream, bytes). Unless it succeeded
        (`ok`), its traceback is delayed until :meth:`settle`.
        """
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
