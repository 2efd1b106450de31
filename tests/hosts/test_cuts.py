"""Cables, switches, firewalls and power: all errors name the isolated rank in time, and nothing is left.

Every case has a lab of its own, and several run at the same time, because they mostly wait.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import pytest

from tests.hosts.enduring import HOSTS, PROGRAMS, Outcome, endure
from tests.hosts.netlab import Lab

# One worker of pytest's runs them all: each that had some of these tests would run all cases in its own labs.
pytestmark = pytest.mark.xdist_group("cuts")

RESET = "reject with tcp reset"
AT_ONCE = 4
DEAD_AFTER_S = 3.0
# A job that hangs takes far longer. How soon ranks are told is measured by benchmarks/lost_host.py.
BOUND_S = DEAD_AFTER_S + 10.0


def power_off(lab: Lab) -> None:
    """Nothing that the kernel would still say gets out."""
    lab.unplug("jetson2", "eth")
    lab.kill_host("jetson2")


class Fault(NamedTuple):
    """A fault of the network."""

    strike: Callable[[Lab], None]
    culprit: Optional[int] = 2  # the rank that the others must name; None: the link between `apart`
    apart: Tuple[int, ...] = ()  # ranks that do not receive from each other
    lost: bool = False  # the culprit cannot report any more
    # until all ranks have been told, and the launcher has not ended them yet
    idle_s: float = DEAD_AFTER_S + 1.7


FAULTS: Dict[str, Fault] = {
    "silence": Fault(lambda lab: lab.cut("jetson2")),
    "silence between two": Fault(lambda lab: lab.cut("jetson1", ["jetson2"]), None, (1, 2)),
    "silence between rank 0 and another": Fault(lambda lab: lab.cut("localhost", ["jetson1"]), None, (0, 1)),
    "reset": Fault(lambda lab: lab.cut("jetson2", action=RESET, ways=("input",)), idle_s=2.2),
    "reset between two": Fault(
        lambda lab: lab.cut("jetson1", ["jetson2"], action=RESET, ways=("input",)), None, (1, 2), idle_s=2.2
    ),
    "nothing comes in": Fault(lambda lab: lab.cut("jetson2", ways=("input",))),
    "nothing goes out": Fault(lambda lab: lab.cut("jetson2", ways=("output",))),
    "one way between two": Fault(
        lambda lab: lab.cut("jetson1", ["jetson2"], ways=("output",)), None, (1, 2)
    ),
    "unplugged": Fault(lambda lab: lab.unplug("jetson2", "eth")),
    "power": Fault(power_off, lost=True),
}
WAYS = ("transfer", "group", "idle")
IN_GROUPS = ("silence", "silence between two", "reset", "nothing goes out", "power")
"""What also happens to jobs whose ranks are in a process group of PyTorch's, with links of its own."""


def endure_cut(lab: Lab, directory: Path, way: str, seconds: float, strike: Callable[[Lab], None]) -> Outcome:
    for host in ("jetson1", "jetson2"):
        lab.shape(host, "eth", "200mbit")
    program = [PROGRAMS / "endure.py", directory, way, "--seconds", seconds]
    return endure(lab, directory, program, strike, DEAD_AFTER_S, pause_s=0.0 if way == "idle" else 0.3)


def healing(gap_s: float) -> Callable[[Lab], None]:
    def strike(lab: Lab) -> None:
        lab.cut("jetson2")
        time.sleep(gap_s)
        lab.heal("jetson2")

    return strike


CASES: List[Tuple[str, str]] = [
    (name, way) for name in FAULTS for way in WAYS if way != "group" or name in IN_GROUPS
]


@pytest.fixture(scope="module")
def outcomes(
    able: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Dict[Tuple[str, str], Any]]:
    """The cases that were selected, running; each one's outcome comes when it is asked for."""
    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    cases = [(given.get("name", "healed"), given["way"]) for given in params]
    labs = [Lab("jetson1", "jetson2", no_wlan=True, docker=False) for _ in range(AT_ONCE)]
    free: List[Lab] = []
    base = tmp_path_factory.mktemp("cuts")
    try:
        for lab in labs:
            free.append(lab.start())

        def run(name: str, way: str) -> Outcome:
            lab = free.pop()
            try:
                directory = base / f"{name}, {way}"
                directory.mkdir()
                if name == "healed":
                    seconds = DEAD_AFTER_S + (1.0 if way == "idle" else 2.0)
                    return endure_cut(lab, directory, way, seconds, healing(DEAD_AFTER_S * 0.4))
                seconds = FAULTS[name].idle_s if way == "idle" else 600.0
                return endure_cut(lab, directory, way, seconds, FAULTS[name].strike)
            finally:
                free.append(lab)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            running: Dict[Tuple[str, str], Any] = {case: pool.submit(run, *case) for case in cases}
            yield running
            for future in running.values():
                future.cancel()
    finally:
        for lab in labs:
            lab.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_all_ranks_name_the_rank_cut_off(outcomes: Dict[Tuple[str, str], Any], name: str, way: str) -> None:
    fault = FAULTS[name]
    seen: Outcome = outcomes[name, way].result()
    assert seen.code not in (0, None), seen.output
    assert seen.finished == []
    if fault.culprit is None:
        assert "do not receive each other's messages" in seen.output, seen.output
        # Of a process group's end ringrun learns from the error with which a rank ends.
        assert way == "group" or "the job failed" in seen.output, seen.output
    else:
        assert f"{HOSTS[fault.culprit]}" in seen.output.split("╭")[-1], seen.output
    assert set(seen.errors) == ({0, 1} if fault.lost else {0, 1, 2}), (seen.errors, seen.output)
    took_s = seen.took_s()
    print(f"{name}, {way}: " + ", ".join(f"rank {rank} after {took:.1f} s" for rank, took in took_s.items()))
    assert max(took_s.values()) < BOUND_S, seen.errors
    for rank, error in seen.errors.items():
        if fault.culprit is None:
            # One of the two may be cut off from the rendezvous as well; it names the other.
            assert set(fault.apart) - {rank} <= named(error), (rank, error)
            assert error["kind"] == "LinkLostError" or rank in fault.apart, (rank, error)
        else:
            assert error["rank"] == fault.culprit and error["host"] == HOSTS[fault.culprit], (rank, error)
        assert error["kind"] in ("PeerLostError", "PeerStalledError", "LinkLostError")
    assert seen.left == {}


def named(error: Dict[str, Any]) -> set[int]:
    """The ranks that an error is about: those in its attributes, or in its text."""
    return {rank for rank in range(3) if f"rank {rank}" in error["text"]} | set(error["ranks"] or ())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_a_cut_that_heals_in_time_disturbs_nothing(outcomes: Dict[Tuple[str, str], Any], way: str) -> None:
    seen: Outcome = outcomes["healed", way].result()
    assert (seen.code, seen.errors, seen.finished, seen.left) == (0, {}, [0, 1, 2], {}), seen.output
