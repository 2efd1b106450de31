"""Runs a job to which something happens, and collects what its ranks have written about it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

from tests.hosts import job as jobs
from tests.hosts.job import Job
from tests.hosts.netlab import Lab, wait_for

HOSTS = ("localhost", "jetson1", "jetson2")
PROGRAMS = Path(__file__).parent / "programs"
LEFT_S = 5.0


class Outcome(NamedTuple):
    """The end of a job."""

    struck_s: float  # time of the fault
    code: int
    output: str
    errors: Dict[int, Dict[str, Any]]
    finished: List[int]
    left: Dict[str, List[str]]  # command lines of processes that still ran afterwards

    def took_s(self) -> Dict[int, float]:
        """Seconds from the fault to the error, by rank."""
        return {rank: error["at_s"] - self.struck_s for rank, error in sorted(self.errors.items())}


def read(directory: Path, name: str) -> Dict[int, Dict[str, Any]]:
    return {
        rank: json.loads((directory / f"{name}{rank}").read_text())
        for rank in range(3)
        if (directory / f"{name}{rank}").exists()
    }


def endure(
    lab: Lab,
    directory: Path,
    program: List[Any],
    strike: Callable[[Lab], None],
    dead_after_s: float,
    pause_s: float = 0.3,
    limit_s: float = 40.0,
) -> Outcome:
    """Run a job on three hosts with a fault, and return what is left. The ranks write to `directory`;
    `strike` makes the fault `pause_s` after all ranks run; `limit_s` is for the end of the job after that.
    """
    options = ["-H", ",".join(HOSTS), "--dead-after", dead_after_s, "-x", "OMP_NUM_THREADS=1"]
    with Job(lab, *options, *program) as job:
        wait_for(lambda: len(read(directory, "running")) == 3, 120, "a running job")
        time.sleep(pause_s)
        struck_s = time.time()
        strike(lab)
        code = job.finish(timeout_s=limit_s)
    wait_until_s = time.monotonic() + LEFT_S
    while jobs.job_processes(lab, str(directory)) and time.monotonic() < wait_until_s:
        time.sleep(0.05)
    left = jobs.job_processes(lab, str(directory))
    lab.restore()
    return Outcome(
        struck_s, code, job.output, read(directory, "error"), list(read(directory, "finished")), left
    )


def stage_program(directory: Path | str) -> List[Any]:
    """Return the command of a pipeline that trains until it loses a stage."""
    return [PROGRAMS / "stage.py", directory]


def kill_stage(lab: Lab) -> None:
    """End the process of the pipeline's middle stage by SIGKILL."""
    program = str(PROGRAMS / "stage.py")
    (victim,) = [pid for pid, line in lab.processes(HOSTS[1]) if line.split()[1:2] == [program]]
    os.kill(victim, signal.SIGKILL)


def cut_stage(lab: Lab) -> None:
    """Set the link of that stage's host down."""
    lab.unplug(HOSTS[1], "eth")
