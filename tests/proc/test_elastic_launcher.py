"""Elastic jobs of the real launcher on this machine: what does not depend on the ranks' collectives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Dict

import pytest

from tests.proc.test_ringrun_support import LIMIT_S, SOURCES, Launched, ringrun


def environment(folder: Path) -> Dict[str, str]:
    """Variables that keep a job's control socket away from those of other tests."""
    return {"XDG_RUNTIME_DIR": str(folder)}


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``ringrun add`` or ``ringrun drop``."""
    env = {**os.environ, "PYTHONPATH": SOURCES, **environment(folder)}
    return subprocess.run(
        [sys.executable, "-m", "ringrun", *words], env=env, capture_output=True, text=True, timeout=LIMIT_S
    )


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_all_ranks_failing_ends_the_job_with_horovods_text() -> None:
    done = ringrun("--horovod", "-np", "2", "--min-np", "1", "sh", "-c", "sleep 0.2; exit 3")
    assert done.process.returncode == 3
    assert (
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        "terminated. The first process to do so was:" in done.err
    )
    assert "Process name: localhost[" in done.err and "Exit code: 3" in done.err


def test_a_program_that_does_not_use_ringcomm_ends_well() -> None:
    done = ringrun("--min-np", "2", "sh", "-c", "echo $RINGCOMM_MEMBER of $RINGCOMM_SIZE: $RINGCOMM_ELASTIC")
    assert done.process.returncode == 0
    assert sorted(done.out.splitlines()) == ["[localhost:0] 0 of 2: 1", "[localhost:1] 1 of 2: 1"]
    assert done.err.count("╭") == 0


@pytest.mark.release
def test_the_start_timeout_does_not_end_a_job_that_has_started() -> None:
    done = ringrun("--min-np", "1", "--start-timeout", "2", "sh", "-c", "sleep 4; echo done")
    assert (done.process.returncode, done.out) == (0, "[localhost:0] done\n"), done.err


def test_a_first_failure_of_the_script_ends_the_job(tmp_path: Path) -> None:
    path = script(tmp_path / "hosts", "echo it is broken >&2; exit 5")
    done = ringrun("--min-np", "2", "--host-discovery-script", path, "sleep", "60")
    assert done.process.returncode == 1
    assert "The host discovery script failed at its first run" in done.err
    assert "exit code 5: it is broken" in done.err




def test_ctrl_c_ends_an_elastic_job_and_leaves_nothing() -> None:
    job = Launched("--min-np", "2", "sleep", "60")
    job.find("sleep 60", 2)
    os.kill(job.process.pid, signal.SIGINT)
    assert job.finish() == 130
