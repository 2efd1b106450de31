"""ringrun in jobs of a real Slurm."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Dict, List, Tuple

import pytest

from ringrun.plan.hosts import expand, tasks_per_node
from tests.hosts.job import job_processes
from tests.hosts.netlab import Lab, wait_for
from tests.slurm.cluster import Slurm

MEMBER = Path(__file__).parent / "programs" / "member.py"
LINE = re.compile(
    r"rank (\d+) of (\d+) on (\S+) local (\d+) of (\d+): total (\d+) node (\d+|None) restart (\d+|None)"
)


def places(output: str) -> Dict[int, Tuple[str, int]]:
    """By rank, its host and its local rank; every rank has the sum over all of them."""
    found = {int(row[0]): row for row in LINE.findall(output)}
    size = len(found)
    for row in found.values():
        assert (int(row[1]), int(row[5])) == (size, size * (size + 1) // 2), output
    return {rank: (row[2], int(row[3])) for rank, row in sorted(found.items())}


def batch(slurm: Slurm, command: str, *options: str) -> Tuple[int, Path]:
    """Submit a job; its number and the file with its output."""
    script = slurm.folder / f"batch-{time.monotonic_ns()}.sh"
    script.write_text(f"#!/bin/sh\n{command}\n")
    out = script.with_suffix(".out")
    said = slurm.run("sbatch", "--parsable", f"--output={out}", *options, script).stdout
    return int(said.split(";")[0]), out


def state(slurm: Slurm, job: int) -> str:
    """The state of a job, like RUNNING."""
    shown = slurm.run("scontrol", "show", "job", job).stdout
    return re.findall(r"JobState=(\S+)", shown)[0]


def await_state(slurm: Slurm, job: int, *wanted: str, limit_s: float = 90) -> None:
    wait_for(lambda: state(slurm, job) in wanted, limit_s, f"job {job} in {' or '.join(wanted)}")


def await_text(path: Path, text: str, count: int = 1, limit_s: float = 60) -> None:
    wait_for(lambda: path.exists() and path.read_text().count(text) >= count, limit_s, f"{text!r} in {path}")


def await_no_process(lab: Lab, marker: str) -> None:
    wait_for(lambda: not job_processes(lab, marker), 30, f"the end of all processes of {marker}")


def test_node_lists_are_those_of_scontrol(slurm: Slurm) -> None:
    for text in ("node", "a,gpu-[0-3,7],node12", "r1n[008-011]", "a[1-2]-ib[0,2-3]", "x[5],x[05],x[005-6]"):
        assert expand(text) == slurm.run("scontrol", "show", "hostnames", text).stdout.split()


def test_an_allocation_needs_no_list_of_hosts(slurm: Slurm) -> None:
    done = slurm.run("salloc", "-N2", "-n4", "ringrun", MEMBER)
    assert places(done.stdout) == {
        0: ("jetson1", 0), 1: ("jetson1", 1), 2: ("jetson1", 2), 3: ("jetson2", 0)
    }  # fmt: skip
    assert re.search(r"hosts and slots are those of Slurm job \d+: jetson1:3, jetson2:1", done.stderr)
    assert done.stdout.count("foreign []") == 4  # nothing takes a rank for the one task of its agent's step
    assert re.findall(r"node (\d)", done.stdout).count("1") == 1


def test_the_shells_variables_arrive_byte_for_byte(slurm: Slurm) -> None:
    value = b"a\n'\"$HOME`x`\\ \xc3\xa9 \xff" + b"x" * 100_000
    program = slurm.folder / "show.py"
    text = "import hashlib, os\nprint('got', hashlib.sha256(os.environb[b'MY_TOKEN']).hexdigest())\n"
    program.write_text(text)
    environ = {**slurm.environ(), "MY_TOKEN": os.fsdecode(value)}
    done = slurm.run("salloc", "-N2", "-n2", "ringrun", program, env=environ, errors="surrogateescape")
    assert re.findall("got ([0-9a-f]+)", done.stdout) == [hashlib.sha256(value).hexdigest()] * 2, done.stdout


def test_a_batch_job_with_two_tasks_per_node(slurm: Slurm, slurm_lab: Lab) -> None:
    job, out = batch(slurm, f"ringrun -np 5 {MEMBER} pairs", "-N3", "--ntasks-per-node=2")
    await_state(slurm, job, "COMPLETED", "FAILED")
    assert places(out.read_text()) == {
        0: ("jetson1", 0), 1: ("jetson1", 1), 2: ("jetson2", 0), 3: ("jetson2", 1), 4: ("jetson3", 0)
    }  # fmt: skip
    await_no_process(slurm_lab, "member.py pairs")


def test_the_batch_script_of_the_third_article(slurm: Slurm) -> None:
    """It asks for nodes but not for tasks, and its dash is what a word processor makes of a hyphen."""
    job, out = batch(slurm, f"ringrun \u2013n 4 python {MEMBER}", "-c", "2", "-N", "2", "--export=ALL")
    await_state(slurm, job, "COMPLETED", "FAILED")
    assert [host for host, _ in places(out.read_text()).values()] == ["jetson1"] * 2 + ["jetson2"] * 2


def test_two_jobs_in_one_allocation_at_once(slurm: Slurm) -> None:
    flags = [slurm.folder / f"flag{number}" for number in (1, 2)]
    # Each ends only when the other has started, too.
    both = [
        f"ringrun --output-dir {slurm.folder}/both{number} {MEMBER} until {flag} &"
        for number, flag in enumerate(flags)
    ]
    job, out = batch(slurm, "\n".join([*both, "wait"]), "-N2", "-n2")
    for number in (0, 1):
        await_text(slurm.folder / f"both{number}" / "rank.1" / "stdout", "started")
    for flag in flags:
        flag.touch()
    await_state(slurm, job, "COMPLETED", "FAILED")
    assert len(LINE.findall(out.read_text())) == 4, out.read_text()


def test_a_cancelled_job_leaves_no_process(slurm: Slurm, slurm_lab: Lab) -> None:
    job, out = batch(slurm, f"ringrun {MEMBER} sleep cancelled", "-N2", "-n2")
    await_text(out, "started", 2)
    slurm.run("scancel", job)
    await_state(slurm, job, "CANCELLED")
    await_no_process(slurm_lab, "sleep cancelled")


def test_the_end_of_a_rank_ends_the_job(slurm: Slurm, slurm_lab: Lab) -> None:
    job, out = batch(slurm, f"ringrun {MEMBER} sleep killed", "-N2", "-n2")
    await_text(out, "started", 2)
    (rank,) = [pid for pid, line in slurm_lab.processes("jetson2") if line.endswith("sleep killed")]
    subprocess.run(["kill", "-KILL", str(rank)], check=True)
    await_state(slurm, job, "FAILED")
    text = out.read_text()
    assert "rank 1 on jetson2" in text and "SIGKILL" in text, text
    await_no_process(slurm_lab, "sleep killed")


def test_a_lost_step_is_named(slurm: Slurm, slurm_lab: Lab) -> None:
    job, out = batch(slurm, f"ringrun {MEMBER} sleep lost", "-N2", "-n2")
    await_text(out, "started", 2)
    steps = slurm.run("squeue", "-h", "-s", "-j", job, "-o", "%i").stdout.split()
    slurm.run("scancel", "--signal=KILL", *[step for step in steps if step.endswith(".0")])
    await_state(slurm, job, "FAILED")
    assert "jetson2: the job step on it (srun)" in out.read_text(), out.read_text()
    await_no_process(slurm_lab, "sleep lost")


def test_srun_must_not_start_ringrun_itself(slurm: Slurm) -> None:
    done = slurm.run("srun", "-N2", "-n2", "ringrun", MEMBER, check=False)
    assert done.returncode != 0 and "Start it once, without srun" in done.stderr


def test_tasks_per_node_are_those_that_slurm_has_placed(slurm: Slurm) -> None:
    shown = slurm.run("salloc", "-N3", "-n5", "sh", "-c", "echo $SLURM_TASKS_PER_NODE; srun hostname").stdout
    first, *hosts = shown.split()
    counts: List[int] = [hosts.count(f"jetson{number}") for number in (1, 2, 3)]
    assert tasks_per_node(first) == counts and sum(counts) == 5


@pytest.fixture(scope="module", autouse=True)
def overdue(slurm: Slurm) -> Tuple[int, Path]:
    """A job that runs beside the other tests until its time limit ends it: Slurm looks every 30 s."""
    return batch(slurm, f"ringrun {MEMBER} sleep overdue", "-N2", "-n2", "--time=1")


@pytest.mark.timeout(240)
def test_the_time_limit_leaves_no_process(slurm: Slurm, slurm_lab: Lab, overdue: Tuple[int, Path]) -> None:
    job, out = overdue
    await_text(out, "started", 2)
    # Sooner than a minute after its start, unless that has passed.
    slurm.run("scontrol", "update", f"JobId={job}", "EndTime=now+1", check=False)
    await_state(slurm, job, "TIMEOUT", limit_s=150)
    await_no_process(slurm_lab, "sleep overdue")
    assert "SIGTERM" in out.read_text(), out.read_text()
