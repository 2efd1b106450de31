"""Processes of a job: bytes for them, how they are found and ended, with processes that are really there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
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


IN_A_PROCESS = """
import os, sys
from ringrun.agent import processes
"""


def run(program: str, data: bytes = b"", **changes: Any) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-c", IN_A_PROCESS + program]
    return subprocess.run(argv, input=data, stdout=subprocess.PIPE, timeout=100, check=False, **changes)


def test_more_bytes_than_a_pipe_holds_come_from_a_process() -> None:
    """Where there is no memory without a name. The reader may end early, too."""
    program = """
del os.memfd_create
data = bytes(range(256)) * 4000
inherited = processes.InheritedBytes(data)
descriptors = [inherited.descriptor() for _ in range(2)]
os.close(descriptors[1])
with open(descriptors[0], "rb") as file:
    assert file.read() == data
for _ in range(2):
    os.wait()
print("read")
"""
    assert run(program).stdout == b"read\n"


@pytest.mark.parametrize(("end", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 128 + 9)])
def test_the_guard_ends_as_the_agent_and_leaves_nothing(end: str, code: int) -> None:
    program = f"""
import subprocess
child = os.fork()
if child == 0:
    {end}
processes.prctl(processes.load_libc(), processes.PR_SET_CHILD_SUBREAPER, 1)
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(left.pid, flush=True)
processes.run_guard(child, "none", 0)
"""
    done = run(program)
    assert done.returncode == code
    stat = Path(f"/proc/{int(done.stdout)}/stat")  # init may not have waited for it yet
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"
