"""Progress bars of several ranks, as the user sees them: on a terminal, and in a pipe."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import List

import pytest

from tests.proc.test_ringrun_support import LIMIT_S, SOURCES

RANKS, STEPS = 3, 300
PROGRAM = f"""
import sys, time
for step in range({STEPS + 1}):
    state = f"{{step}}/{STEPS}"
    sys.stdout.write(chr(8) * len(state) + "\\r" + state)  # as Keras does
    sys.stdout.flush()
    time.sleep(0.01)
sys.stdout.write("\\nafterwards\\n")
"""


def on_a_terminal(arguments: List[str]) -> str:
    """Return what ringrun writes to a terminal."""
    pty = pytest.importorskip("pty")
    controller, terminal = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": SOURCES, "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ringrun", *arguments], stdin=subprocess.DEVNULL, stdout=terminal,
        stderr=terminal, env=environ, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    written = b""
    with contextlib.suppress(OSError):  # the end: no process has the terminal open any more
        while True:
            written += os.read(controller, 65536)
    os.close(controller)
    assert process.wait(LIMIT_S) == 0, written
    return written.decode()


@pytest.mark.full
def test_a_terminal_has_one_line_for_all_bars() -> None:
    written = on_a_terminal(["-np", str(RANKS), sys.executable, "-c", PROGRAM])
    *rows, rest = written.split("\n")
    assert rest == ""
    visible = [row.rpartition("\x1b[K")[2].rstrip("\r") for row in rows]  # what is left of each row
    bars = [row for row in visible if "/" in row and row.startswith("[")]
    assert sorted(bars) == [f"[localhost:{rank}] {STEPS}/{STEPS}" for rank in range(RANKS)]
    assert sum(row.endswith("afterwards") for row in visible) == RANKS
    assert "\x1b[K" in written
    assert "\x08" not in written
