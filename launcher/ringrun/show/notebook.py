"""The output below a cell of a notebook, where one line at its end can be rewritten."""

from __future__ import annotations

import sys
from typing import Collection, Optional, Sequence, Tuple

from .console import Console
from .output import cut_to_width

WIDTH = 100
"""Width of the line that is rewritten, in characters."""


class NotebookConsole(Console):
    """Writes to ``sys.stdout`` and ``sys.stderr`` of a kernel. The state of progress bars is one line that a
    carriage return rewrites, as front ends of Jupyter show it.
    """

    def __init__(self) -> None:
        self._state: Optional[Tuple[int, int]] = None  # the stream and the length of the line

    @property
    def terminals(self) -> Collection[int]:
        return (1, 2)

    def show_state(self, stream: int, lines: Sequence[bytes]) -> None:
        if self._state is not None and (not lines or self._state[0] != stream):
            self._clear()
        if lines:
            line = cut_to_width(lines[-1], WIDTH)
            before = 0 if self._state is None else self._state[1]
            super().write(stream, b"\r" + line.ljust(before))
            self._state = stream, len(line)

    def _clear(self) -> None:
        shown, self._state = self._state, None
        if shown is not None:
            super().write(shown[0], b"\r" + b" " * shown[1] + b"\r")

    def write(self, stream: int, data: bytes) -> None:
        if data:
            self._clear()
            super().write(stream, data)

    def close(self, timeout_s: Optional[float] = None) -> None:
        self._clear()


def own_console() -> Console:
    """Return the console for a function that this process runs as a job, in Jupyter the notebook's."""
    in_kernel = type(sys.stdout).__module__.split(".")[0] == "ipykernel"
    return NotebookConsole() if in_kernel else Console()
