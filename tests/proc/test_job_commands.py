"""`ringrun ps` and `ringrun stop`: they find the user's jobs, and end one of them completely."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator

import pytest

from ringrun.job.control import jobs_of
from tests.proc.test_ringrun_support import LIMIT_S, SOURCES, Launched

SLEEP = [sys.executable, "-c", "print('here', flush=True); import time; time.sleep(600)"]


@pytest.fixture
def runtime() -> Iterator[str]:
    """A short path: those of Unix sockets have a limit."""
    with tempfile.TemporaryDirectory(prefix="ringrun-") as name:
        yield name


def command(runtime: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ: Dict[str, str] = {**os.environ, "PYTHONPATH": SOURCES, "XDG_RUNTIME_DIR": runtime}
    return subprocess.run(
        [sys.executable, "-m", "ringrun", *words], env=environ, timeout=LIMIT_S, text=True,
        capture_output=True,
    )  # fmt: skip


def answered(runtime: str, answer: bytes, *words: str) -> int:
    """The exit code of a command whose question is answered on a terminal."""
    own, its = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "ringrun", *words], stdin=its, stdout=its, stderr=its,
            env={**os.environ, "PYTHONPATH": SOURCES, "XDG_RUNTIME_DIR": runtime},
        )  # fmt: skip
        seen = b""
        while b"[y/N]" not in seen:
            seen += os.read(own, 1000)
        os.write(own, answer)
        return process.wait(LIMIT_S)
    finally:
        os.close(own)
        os.close(its)


def started(runtime: str, *words: str) -> Launched:
    job = Launched(*words, env={"XDG_RUNTIME_DIR": runtime})
    assert job.process.stdout is not None and b"here" in job.process.stdout.readline()
    return job


@pytest.mark.full
def test_jobs_are_listed_and_one_is_ended(runtime: str) -> None:
    one, other = started(runtime, "-np", "2", *SLEEP), started(runtime, "-np", "1", *SLEEP)
    listed = command(runtime, "ps").stdout.splitlines()
    assert listed[0].split() == ["JOB", "PID", "RANKS", "RUNS", "FOR", "HOSTS", "PROGRAM"]
    rows = {int(line.split()[1]): line.split() for line in listed[1:]}
    assert set(rows) == {one.process.pid, other.process.pid}
    assert rows[one.process.pid][2] == "2" and rows[one.process.pid][-1] == sys.executable
    done = command(runtime, "stop", rows[one.process.pid][0])
    assert done.returncode == 0 and "is being ended" in done.stdout, done.stderr
    assert one.finish() == 143  # as after SIGTERM; finish() checks that nothing is left
    assert answered(runtime, b"y\n", "stop") == 0
    assert other.finish() == 143
    assert jobs_of(Path(runtime) / "ringrun") == ([], [])
