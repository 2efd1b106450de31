"""Elastic jobs over three hosts, with and without ringrun: losses, cut cables, hosts that come and go."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

import pytest

from tests.hosts.job import Job
from tests.hosts.netlab import Lab
from tests.proc import test_elastic as by_hand
from tests.proc.elastic_jobs import ElasticJob
from tests.proc.test_elastic_launcher_jobs import PROGRAM, endings, starts
from tests.proc.test_ringrun_support import ringrun

HOSTS = ("localhost", "jetson1", "jetson2")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def job(lab: Lab) -> Iterator[ElasticJob]:
    def launch(host: str, arguments: Sequence[str], env: Dict[str, str]) -> subprocess.Popen[str]:
        return lab.popen(host, arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    with ElasticJob(
        "--min-np", "2", "--np", "3", program=by_hand.PROGRAM, launch=launch,
        address=lab.addresses("localhost")[0], STEPS="1500", COUNT="1000",
        RINGCOMM_DEAD_AFTER="3", RINGCOMM_START_TIMEOUT="8",
    ) as made:  # fmt: skip
        for host in HOSTS:
            made.start(1, host)
        made.wait_for(lambda _, line: line.startswith("step"), 3)
        yield made


def test_only_the_side_with_the_rendezvous_goes_on(lab: Lab, job: ElasticJob) -> None:
    *near, far = job.workers
    lab.cut("jetson2")
    job.wait_for(lambda worker, line: worker in near and line.startswith("step") and "epoch=1" in line, 2)
    assert far.end() == 1, job.output()
    assert "rendezvous" in "\n".join(far.lines), job.output()
    assert not any("epoch=1" in line for line in far.lines), job.output()
    assert [worker.end() for worker in near] == [0, 0], job.output()
    (lost,) = job.notices("lost")
    assert "rank" in lost and "jetson2" in lost, job.output()


THREE = ",".join(HOSTS)


@pytest.fixture(autouse=True)
def own_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def go_on(tmp_path: Path) -> Path:
    """A file without which a job ends."""
    path = tmp_path / "go_on"
    path.touch()
    return path


def elastic(lab: Lab, go_on: Path, *options: Any) -> Job:
    """A job that goes on while there is this file."""
    return Job(lab, "--min-np", 2, "--dead-after", 3, "-x", f"GO_ON={go_on}", *options, PROGRAM)


def finish(job: Job, go_on: Path, ranks: int) -> None:
    """Let the job end, which it does with the right numbers on so many ranks."""
    go_on.unlink()
    assert job.finish() == 0, job.output
    assert endings(job.output) == ranks, job.output


def pids_on(lab: Lab, host: str) -> List[int]:
    """The processes of the job's ranks on a host, as seen from here."""
    return [pid for pid, line in lab.processes(host) if line.endswith("elastic_steps.py")]


@pytest.mark.smoke
def test_a_killed_rank_of_another_host_comes_back(lab: Lab, go_on: Path) -> None:
    with elastic(lab, go_on, "-H", THREE) as job:
        job.wait_for_line(r"\[jetson2:2\] member 2 pid .* of 3 from")
        (pid,) = pids_on(lab, "jetson2")
        os.kill(pid, signal.SIGKILL)
        job.wait_for_line(r"rank 2 \(jetson2\) lost: killed by SIGKILL; going on with 2 ranks after")
        job.wait_for_line(r"ringrun: jetson2 joined again: 3 ranks")
        finish(job, go_on, 3)


def test_a_host_that_is_cut_off_is_left_behind_and_taken_again(lab: Lab, go_on: Path) -> None:
    """Its ranks end by themselves, and its agent's connection comes back with the cable."""
    with elastic(lab, go_on, "-H", THREE) as job:
        job.wait_for_line(r"\[jetson2:2\] member 2 pid .* of 3 from")
        lab.unplug("jetson2", "eth")
        job.wait_for_line(r"\[localhost:0\] member 0 pid .* of 2 from")
        lab.plug("jetson2", "eth")
        job.wait_for_line(r"ringrun: jetson2 joined again: 3 ranks", 90.0)
        finish(job, go_on, 3)
    assert len(re.findall(r"rank 2 \(jetson2\) lost: .*; going on with 2 ranks", job.output)) == 2, job.output
    assert "Traceback" not in job.output, job.output


def test_a_host_joins_while_the_others_train(lab: Lab, tmp_path: Path, go_on: Path) -> None:
    """It sleeps before init(): the others make steps meanwhile. Then another one is dropped."""
    settings = ("-x", "SLEEP=3", "-x", "SLEEP_FROM=2", "-x", "PAUSE=0.02")
    with elastic(lab, go_on, "-H", "localhost,jetson1", *settings) as job:
        job.wait_for_line(r"\[localhost:0\] member 0 pid .* of 2 from")
        assert ringrun("add", "jetson2").process.returncode == 0
        job.wait_for_line(r"ringrun: jetson2 joined: 3 ranks", 60.0)
        assert "leaves at the next commit" in ringrun("drop", "jetson1").out
        job.wait_for_line(r"ringrun: jetson1 left: 2 ranks")
        finish(job, go_on, 2)
    (line,) = [line for line in starts(job.output)[2] if "of 3" in line]
    assert int(line.rpartition(" ")[2]) > 30, line
    assert " lost: " not in job.output
    assert lab.processes("jetson1") == []
