"""`--watch` and `--report` of real jobs: the slow rank is the one that is marked."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence

import pytest

from ringcomm.clock import Deadline
from tests.proc.test_ringrun_support import LIMIT_S, SOURCES

PROGRAM = """
import os, sys, time
import numpy as np
import ringcomm as rc

rc.init()
x = np.ones(1000, np.float32)
by_name = sys.argv[1] == "name"
while True:
    if rc.rank() == 1:
        time.sleep(0.05)
    rc.allreduce_async(x, name="gradient").wait() if by_name else rc.allreduce(x)
    if not by_name:
        rc.count_step()
    ends = np.array([os.path.exists("enough")], np.int32)
    if rc.allreduce(ends, op=rc.Max)[0]:
        break
"""
SLOWEST = "rank 1 (localhost) is the slowest: the others wait for it"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def on_a_terminal(
    arguments: Sequence[str], cwd: Path, react: Callable[[str], bytes], more: Optional[Dict[str, str]] = None
) -> str:
    """Return what ringrun writes to a terminal of 30 lines; `react` returns what to type after that."""
    pty = pytest.importorskip("pty")
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 150, 0, 0))
    environ = {**os.environ, **(more or {}), "PYTHONPATH": SOURCES, "TERM": "xterm"}
    environ["RINGCOMM_DIAGNOSE_DIR"] = str(cwd)
    process = subprocess.Popen(
        [sys.executable, "-m", "ringrun", *arguments], stdin=terminal, stdout=terminal, stderr=terminal,
        env=environ, cwd=cwd, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    before = termios.tcgetattr(terminal)
    data, deadline = b"", Deadline(2 * LIMIT_S)
    try:
        while process.poll() is None or select.select([controller], [], [], 0)[0]:
            if select.select([controller], [], [], 0.1)[0]:
                data += os.read(controller, 65536)
                os.write(controller, react(data.decode(errors="replace")))
            assert not deadline.expired(), data.decode(errors="replace")
        assert process.returncode == 0, data.decode(errors="replace")
        assert termios.tcgetattr(terminal)[3] == before[3], "the terminal is not as it was"
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(controller)
    return data.decode(errors="replace")


@pytest.mark.parametrize("way", ["direct", pytest.param("name", marks=pytest.mark.release)])
def test_the_slow_rank_is_marked_in_the_table_and_in_the_report(program: Path, way: str) -> None:
    typed: List[bytes] = []

    def react(written: str) -> bytes:
        if SLOWEST in written and not typed:
            typed.append(b"s")
            return b"s"
        if "wait in" in written or "ringrun diagnose" in written:
            (program / "enough").touch()
        return b""

    arguments = ["-np", "3", "--oversubscribe", "--watch", "--report", "run.html", "train.py", way]
    written = on_a_terminal(arguments, program, react)
    assert re.search(r"\x1b\[31m>    1  localhost +\d+ ", written), written
    assert "\x1b[A" in written and "q: leave this view" in written
    table = written[written.rindex("ringrun:   rank  host") :]  # what stays
    assert re.search(r"ringrun: >    1  localhost", table) and "\x1b[31m" not in table.split("report:")[0]
    page = (program / "run.html").read_text()
    assert f"R{SLOWEST[1:]}" in page and re.search(r"<tr class=slow><td>1</td>", page)
    assert "Steps per second" in page
