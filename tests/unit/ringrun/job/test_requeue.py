from __future__ import annotations

import signal
from pathlib import Path
from typing import Dict, List

import pytest

from ringrun.job.launch import prepare
from ringrun.job.requeue import requeue, restarts_before
from ringrun.plan.options import Options

BATCH = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


@pytest.mark.parametrize(
    ("environ", "restarts", "signum", "state", "said"),
    [
        (BATCH, 2, signal.SIGTERM, "RUNNING", "restart 2 of 2"),
        (BATCH, 1, signal.SIGTERM, "RUNNING", ""),  # no restart is left
        (BATCH, 2, signal.SIGINT, "RUNNING", ""),  # the user
        (BATCH, 2, signal.SIGTERM, "CANCELLED", ""),
        (BATCH, 2, signal.SIGTERM, "TIMEOUT", ""),
        ({**BATCH, "SLURM_STEP_ID": "0"}, 2, signal.SIGTERM, "RUNNING", ""),
        ({}, 2, signal.SIGTERM, "RUNNING", ""),
    ],
)
def test_when_slurm_starts_the_job_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    environ: Dict[str, str], restarts: int, signum: int, state: str, said: str,
) -> None:  # fmt: skip
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\necho "   JobState={state} Reason=None"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    lines: List[str] = []
    requeue(environ, restarts, signum, lines.append)
    calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    assert ("requeue 7" in calls) is bool(said)
    assert len(lines) == bool(said) and all(said in line for line in lines)


def test_slurm_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$1" = requeue ] && exit 1\necho JobState=RUNNING\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    lines: List[str] = []
    requeue(BATCH, 2, signal.SIGTERM, lines.append)
    assert "--no-requeue" in lines[-1]


def test_ranks_see_how_often_the_job_was_started() -> None:
    assert [restarts_before(environ) for environ in ({}, BATCH, {"SLURM_RESTART_COUNT": "x"})] == [0, 1, 0]
    job = prepare(Options(np=2), ["true"], {"PATH": "/", "SLURM_RESTART_COUNT": "1"})
    assert job.agent_config(job.hosts[0])["env"]["RINGCOMM_RESTART"] == "1"
