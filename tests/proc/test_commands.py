"""`ringrun ps`, `stop` and `doctor`, as a user calls them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator

import pytest

from ringrun.doctor.report import examine
from ringrun.job.control import jobs_of
from ringrun.job.launch import prepare
from ringrun.plan.job import Job
from ringrun.plan.options import Options
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


VIA = "env NAME={host}"


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ringrun", "doctor", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)


def job_of(names: str, via: str) -> Job:
    return prepare(Options(hosts=names, via=via, ship_self=False), ["true"])


def test_two_names_of_this_machine_are_found_out() -> None:
    found = doctor("-H", "a,b", "--via", VIA)
    assert found.returncode == 1, found.stderr
    text = " ".join(found.stdout.split())
    assert "a, b are one machine" in text and "Examined 2 hosts in" in text


def test_everything_as_data() -> None:
    found = json.loads(doctor("-H", "a,b", "--via", VIA, "--json").stdout)
    assert [host["name"] for host in found["hosts"]] == ["a", "b"]
    assert "are one machine" in json.dumps(found["problems"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-H", "a,,b"], "one comma too many"),
        (["-H", "a", "--via", "docker"], "{host}"),
        (["x"], "Usage"),
        (["-H", "a", "--iface", "b=eth0"], "'b' is not among the hosts"),
        (["-H", "a", "--iface", "1/x"], "1/x"),
    ],  # fmt: skip
)
def test_a_command_line_that_cannot_be_used(words: list[str], text: str) -> None:
    found = doctor(*words)
    assert found.returncode == 2 and text in found.stderr and not found.stdout


def test_an_interface_that_does_not_exist() -> None:
    found = doctor("-H", "a,b", "--via", VIA, "--iface", "b=nosuch0")
    text = " ".join(found.stdout.split())
    assert found.returncode == 1 and "--iface 'nosuch0' matches none of this machine's interfaces" in text


def test_hosts_that_do_not_answer(tmp_path: Path) -> None:
    script = tmp_path / "reach"
    script.write_text('#!/bin/sh\necho Welcome\ncase "$1" in bad) exit 1;; esac\nshift\nexec "$@"\n')
    script.chmod(0o755)
    found = examine(job_of("good,bad", f"{script} {{host}}"))
    assert found.problems[0] == "" and "ended with status 1" in found.problems[1]
    assert found.noises[0] == "Welcome" and found.facts[0] is not None and found.facts[1] is None
    assert not found.tried and not found.routes
    (lost,) = examine(job_of("a", "/no/such/program {host}")).problems
    assert "cannot be started on this machine (No such file or directory)" in lost
