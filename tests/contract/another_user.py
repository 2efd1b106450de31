"""Processes of other users of this machine: the attacker, and an unprivileged user that is attacked."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Mapping, Optional

OTHER_USER = 12345
VICTIM = 54321
SOURCES = os.pathsep.join(str(Path(__file__).resolve().parents[2] / name) for name in ("", "launcher"))


def become(user: int) -> str:
    """The first lines of a program: it becomes this user.

    It may not be able to read the modules any more then, so it imports what it needs before.
    """
    imports = "import json, os, select, socket, sys, time"
    return f"{imports}; os.setgroups([]); os.setgid({user}); os.setuid({user})\n"


@contextmanager
def another_user(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of another user, which has printed its first line; that line is gone.

    Args:
        program: Python.
        arguments: its command line.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", become(OTHER_USER) + program, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def ringrun_as_victim(
    *words: str, environ: Optional[Mapping[str, str]] = None, user: int = VICTIM
) -> subprocess.CompletedProcess[str]:
    """Run a command of ``ringrun`` beside running a job, as an unprivileged user.

    Args:
        words: the command line.
        environ: variables for it.
        user: number of the user.
    """
    program = f"import ringrun.cli, ringrun.job.job_commands\n{become(user)}ringrun.cli.main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, cwd="/",
        env={**os.environ, "PYTHONPATH": SOURCES, **(environ or {})},
    )  # fmt: skip
