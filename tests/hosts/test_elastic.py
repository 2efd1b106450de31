"""Elastic jobs on several hosts: a host that is cut off is left behind, and only one side goes on."""

from __future__ import annotations

import subprocess
from typing import Callable, Dict, Iterator, Sequence

import pytest

from tests.hosts.netlab import Lab
from tests.proc.elastic_jobs import ElasticJob
from tests.proc.test_elastic import PROGRAM

HOSTS = ("localhost", "jetson1", "jetson2")
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def job(lab: Lab) -> Iterator[ElasticJob]:
    def launch(host: str, arguments: Sequence[str], env: Dict[str, str]) -> subprocess.Popen[str]:
        return lab.popen(host, arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    with ElasticJob(
        "--min-np", "2", "--np", "3", program=PROGRAM, launch=launch, address=lab.addresses("localhost")[0],
        STEPS="1500", COUNT="1000", RINGCOMM_DEAD_AFTER="3", RINGCOMM_START_TIMEOUT="8",
    ) as made:  # fmt: skip
        for host in HOSTS:
            made.start(1, host)
        made.wait_for(lambda _, line: line.startswith("step"), 3)
        yield made


@pytest.mark.parametrize(
    "strike",
    [
        pytest.param(lambda lab: lab.unplug("jetson2", "eth"), marks=pytest.mark.release),
        lambda lab: lab.cut("jetson2"),
    ],
    ids=["unplugged", "partition"],
)
def test_only_the_side_with_the_rendezvous_goes_on(
    lab: Lab, job: ElasticJob, strike: Callable[[Lab], None]
) -> None:
    *near, far = job.workers
    strike(lab)
    job.wait_for(lambda worker, line: worker in near and line.startswith("step") and "epoch=1" in line, 2)
    assert far.end() == 1, job.output()
    assert "rendezvous" in "\n".join(far.lines), job.output()
    assert not any("epoch=1" in line for line in far.lines), job.output()
    assert [worker.end() for worker in near] == [0, 0], job.output()
    (lost,) = job.notices("lost")
    assert "rank" in lost and "jetson2" in lost, job.output()
