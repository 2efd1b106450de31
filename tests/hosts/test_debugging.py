"""`--debug` for a rank of another host: the user's terminal reaches its debugger through the agent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List

import pytest

from tests.hosts.netlab import Lab
from tests.proc.test_watching import on_a_terminal

pytestmark = pytest.mark.release

STOPS = """
import os
import sys
import numpy as np
import ringcomm as rc

rc.init()
answer = 6 * rc.rank()
if rc.rank() == 2:
    print("terminals", *map(os.isatty, range(3)), os.environ["TERM"], *os.get_terminal_size(0), flush=True)
    breakpoint()
    print(f"typed {sys.stdin.read()!r}", flush=True)  # one write, since other ranks' lines come in between
print("sum", rc.allreduce(np.array([answer]), op=rc.Sum)[0], flush=True)
"""


def test_a_debugger_on_another_host_has_the_terminal(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STOPS)
    lines = [b"p 7 * answer\n", b"interact\n", b"answer += 88; answer\n", b"\x04", b"answer = 100\n", b"c\n"]
    typed: List[bytes] = []

    def react(written: str) -> bytes:
        prompts = written.count("(Pdb) ") + written.count(">>> ")
        if prompts > len(typed) and len(typed) < len(lines):
            typed.append(lines[len(typed)])
            return typed[-1]
        if len(typed) == len(lines) and "\x1b" not in written[-1:]:  # a line, then the end of its stdin
            typed.append(b"")
            return b"hello\n\x04"
        return b""

    arguments = ["-x", "PYTHONPATH", "-H", "localhost,jetson1,jetson2", "--cwd", str(tmp_path)]
    arguments += ["--debug", "2", "train.py"]
    written = on_a_terminal(arguments, tmp_path, react, {"PATH": lab.environ()["PATH"]})
    assert "terminals True True True xterm 150 30" in written, written
    assert "\n84\r" in written and "\n100\r" in written  # as pdb prints 7 * 12, and the console 12 + 88
    assert written.count("p 7 * answer") == 1, "the terminal and the pseudo-terminal both show what is typed"
    assert "typed 'hello\\n'" in written
    assert re.search(r"\[localhost:0\]\S* sum 106", written), written  # rank 0 has waited
    assert re.search(r"(?<!\S )sum 106", written)  # rank 2 writes to the terminal itself
