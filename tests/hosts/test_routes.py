"""The right network, start after start: slow one way, bursts, equal or virtual ones, busy processors.

`python -m pytest tests/hosts/test_routes.py --starts 100` tries each case a hundred times.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import pytest

from tests.hosts.job import ROOT
from tests.hosts.netlab import LOCALHOST, Host, Lab
from tests.support.busy import busy

PROGRAMS = Path(__file__).parent / "programs"
STARTS = PROGRAMS / "starts.py"
PORT = 29417
PAUSE_S = 0.45
"""Between two starts: a bucket of 1 MiB is full again after 0.42 s at 20 Mbit/s."""
BOARDS = ("jetson1", "jetson2")
EVERYWHERE = (LOCALHOST, *BOARDS)
OUT, IN, BOTH = ("output",), ("input",), ("input", "output")
LOAD = 3

Limits = Sequence[Tuple[Sequence[str], str, Sequence[str], str, str]]


@dataclass(frozen=True)
class Case:
    """Three hosts with two networks, one of which is right."""

    limits: Limits  # hosts, role of the interface, ways (the host's), rate and burst of a token bucket
    right: str = "eth"  # role of the network that all links should use
    second: str = "wlan0"  # the boards' second interface
    load: int = 0  # processes that compute at the same time


def slow(burst: str, ways: Sequence[str] = OUT, role: str = "wlan", rate: str = "20mbit") -> Limits:
    return [(BOARDS, role, ways, rate, burst)]


CASES: Dict[str, Case] = {
    "slow-to-send-1m": Case(slow("1mb")), "slow-to-receive-64k": Case(slow("64kb", IN)),
    "busy-1m": Case(slow("1mb"), load=LOAD),
    # Nothing but the measurement can distinguish them; the fixed order prefers the slow one.
    "unnamed-slow-1m": Case(slow("1mb"), second="eth1"),
    "slow-wire-fast-radio": Case(slow("1mb", role="eth"), right="wlan"),
    "equal": Case([], right="wlan", second="eth1"),  # 10.98.… comes before 10.99.…
    "fast-virtual-slow-wire": Case(slow("1mb", BOTH, "eth"), right="wlan", second="vmnet1"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case with its lab."""
    if "name" in metafunc.fixturenames:
        cases = [
            # On a busy machine equal networks are measured to be unequal.
            pytest.param(case.second, name, marks=[pytest.mark.release] * (name == "equal"))
            for name, case in CASES.items()
        ]
        names = list(CASES)
        metafunc.parametrize("bridged_lab, name", cases, ids=names, indirect=["bridged_lab"], scope="module")


@pytest.fixture(scope="module")
def bridged_lab(request: pytest.FixtureRequest, able: None) -> Iterator[Lab]:
    """Two boards, and a machine whose two networks are bridges."""
    boards = [Host(name, wlan=request.param) for name in BOARDS]
    with Lab(*boards, docker=False, bridged=True) as lab:
        yield lab


def start_often(lab: Lab, starts: int) -> List[List[Dict[str, Any]]]:
    """Return what every host's rank says of each start."""
    variables = {
        "RINGCOMM_RENDEZVOUS": f"{lab.addresses(LOCALHOST, 'eth')[0]}:{PORT}",
        "RINGCOMM_KEY": secrets.token_hex(16), "RINGCOMM_SIZE": str(len(EVERYWHERE)), "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        running = []
        for rank, host in enumerate(EVERYWHERE):
            process = lab.popen(
                host, [sys.executable, str(STARTS), "--starts", str(starts), "--pause", str(PAUSE_S)],
                env={**os.environ, **variables, "RINGCOMM_RANK": str(rank)}, stdout=subprocess.PIPE,
            )
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=60 + 8 * starts)[0] for process in running]
        assert [process.returncode for process in running] == [0] * len(running)
    said = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    assert [len(lines) for lines in said] == [starts] * len(said)
    return [list(each) for each in zip(*said)]


def roles_used(table: Sequence[str]) -> List[str]:
    """For each link, by which network it goes."""
    return ["wlan" if " 10.98." in line else "eth" for line in table]


@pytest.mark.timeout(1800)
def test_the_right_network(bridged_lab: Lab, name: str, request: pytest.FixtureRequest) -> None:
    case, lab = CASES[name], bridged_lab
    starts = request.config.getoption("--starts")
    for host in EVERYWHERE:
        for role in ("eth", "wlan"):
            lab.unlimit(host, role)
    for hosts, role, ways, rate, burst in case.limits:
        for host in hosts:
            lab.shape(host, role, rate, burst, "50ms", ways)
    with busy(case.load):
        told = start_often(lab, starts or 2)
    used = [roles_used(ranks[0]["links"]) for ranks in told]
    times_s = [max(x["ended_s"] for x in each) - max(x["began_s"] for x in each) for each in told]
    wrong = [each for each, roles in zip(told, used) if roles != [case.right] * 3]
    print(
        f"{name}: {len(told) - len(wrong)} of {len(told)} starts were right; they took "
        f"{statistics.median(times_s):.2f} s (median), {max(times_s):.2f} s at most"
    )
    assert not wrong, "\n".join(wrong[0][0]["links"])
