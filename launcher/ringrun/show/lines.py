"""The lines of a rank's output. Pure: from chunks of bytes to lines and their states."""

from __future__ import annotations

import re
from typing import List, Optional

MAX_LINE_BYTES = 64 * 1024
PROGRESS_INTERVAL_S = 1.0
"""Time between two lines with the states of progress bars, of all ranks together."""

_REDRAWN = re.compile(rb"[\r\x08]")
_BACKSPACES = re.compile(rb"\x08+")
_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_PIECE = MAX_LINE_BYTES


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
        if plain and len(data) <= _PIECE:
            *lines, rest = (bytes(self._line) + data).split(b"\n")  # fast path for the usual case
            if len(rest) <= _PIECE and (not lines or len(lines[0]) <= _PIECE):
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
        while len(self._line) > _PIECE:
            lines.append(bytes(self._line[:_PIECE]))
            del self._line[:_PIECE]

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
