"""Processes of a job: bytes for them, how they are found and ended, with processes that are really there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from typing import Any, Iterator, List

import pytest

from ringrun.agent import processes

SLEEP = "import sys; print('here', flush=True); sys.stdin.read()"


@pytest.fixture
def started() -> Iterator[List[subprocess.Popen[bytes]]]:
    made: List[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        process.kill()
        process.communicate()


def start(started: List[subprocess.Popen[bytes]], program: str = SLEEP, **variables: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **variables}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    started.append(process)
    return process


def ready(process: Any) -> Any:
    assert process.stdout.readline() == b"here\n"
    return process


def test_processes_of_a_job_on_a_host_are_found_and_ended(started: List[subprocess.Popen[bytes]]) -> None:
    job = uuid.uuid4().hex
    both = [
        ready(start(started, RINGCOMM_JOB=job, RINGCOMM_SLOT=f"1:{local}")) for local in range(2)
    ]  # fmt: skip
    ready(start(started, RINGCOMM_JOB=job, RINGCOMM_SLOT="11:0"))  # of another host
    ready(start(started, RINGCOMM_JOB="other", RINGCOMM_SLOT="1:0"))
    assert processes.strays(job, 1) == sorted(process.pid for process in both)
    assert processes.strays("none", 1) == []
    processes.kill([both[0].pid, 1 << 30], signal.SIGTERM)
    assert both[0].wait(60) == -signal.SIGTERM
    assert processes.strays(job, 1) == [both[1].pid], "one that has ended is not counted"
    processes.sweep(job, 1, limit_s=60.0)
    assert both[1].wait(60) == -signal.SIGKILL
    processes.sweep(job, 1, limit_s=0.0)


def test_all_descendants_are_found_whatever_their_environment(
    started: List[subprocess.Popen[bytes]],
) -> None:
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], env={})"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}, {SLEEP!r}])"
    process = ready(start(started, program))
    found = processes.strays("none", 0, process.pid)
    assert len(found) == 2 and process.pid not in found
    processes.sweep("none", 0, process.pid, limit_s=60.0)
    assert process.wait(60) == 0
    assert processes.strays("none", 0, process.pid) == []
