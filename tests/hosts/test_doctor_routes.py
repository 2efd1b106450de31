"""Hosts with a second, slow network, quiet and busy: the doctor measures what a job takes; no link is blamed.

`python -m pytest tests/hosts/test_doctor_routes.py --starts 30` tries each case thirty times.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Iterator, List

import pytest

from tests.hosts.job import Job
from tests.hosts.netlab import Host, Lab
from tests.hosts.test_doctor import BUSY, THREE, doctor
from tests.hosts.test_routes import STARTS, roles_used
from tests.support.busy import busy

pytestmark = pytest.mark.release

LOADS = (0, len(os.sched_getaffinity(0)))
RUNS = 2
"""How often each case is tried when nothing else is asked for."""


@pytest.fixture(scope="module")
def two_networks(able: None) -> Iterator[Lab]:
    """Two boards and this machine, with a wire, and a radio of 20 Mbit/s that at times answers first."""
    with Lab(Host("jetson1"), Host("jetson2")) as lab:
        yield lab


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--starts") or RUNS


def of_a_job(lab: Lab) -> List[str]:
    """By which network each pair of hosts is linked in a job."""
    with Job(lab, "-H", THREE, sys.executable, STARTS) as job:
        assert job.finish(120.0) == 0, job.output
    table = [line for line in job.output.splitlines() if '"links": ["' in line]
    return roles_used(json.loads(table[0][table[0].index("{") :])["links"])


def of_the_doctor(lab: Lab) -> List[str]:
    """The same, as the doctor reports it; and its problems, but for those that this machine has by itself."""
    done = doctor(lab, "--json")
    assert done.stderr == ""
    data = json.loads(done.stdout)
    rows = [row for row in data["problems"] if not any(text in row["text"] for text in BUSY)]
    assert rows == [] and (done.returncode == 0 or data["problems"]), json.dumps(rows, indent=1)
    names = THREE.split(",")
    links = [row for row in data["links"] if names.index(row["from"]) < names.index(row["to"])]
    ends = [{role: lab.iface(row["to"], role) for role in ("eth", "wlan")} for row in links]
    return [next(role for role in end if end[role] == row["to_iface"]) for row, end in zip(links, ends)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("load", LOADS)
def test_the_doctor_measures_the_network_that_a_job_takes(two_networks: Lab, load: int, runs: int) -> None:
    with busy(load):
        found = [(of_the_doctor(two_networks), of_a_job(two_networks)) for _ in range(runs)]
    same = sum(doctors == jobs for doctors, jobs in found)
    wires = sum(doctors == ["eth"] * 3 for doctors, _ in found)
    print(f"load {load}: the doctor measured what the job took in {same} of {runs} runs, eth0 in {wires}")
    assert (same, wires) == (runs, runs), found
