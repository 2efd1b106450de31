"""Ways to fail x operation x failing rank x links (a selection, or `--all-kills`): the others name it."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

import pytest

from tests.proc.test_ringrun_support import Launched

PROGRAM = Path(__file__).parent / "programs" / "fails.py"
AT_ONCE = 4
DEAD_AFTER_S = 2.0
START_TIMEOUT_S = 5.0
SLOW_MACHINE_S = 2.0
"""What is added to each bound, because several jobs share two cores here."""

# One worker of pytest's runs them all: each that had some of these tests would start the jobs of all.
pytestmark = pytest.mark.xdist_group("kill matrix")

FREEZES = ("SIGSTOP", "holds the lock")
WAYS = (
    "SIGKILL", "SIGSTOP", "SIGSEGV", "exception", "sys.exit(0)", "os._exit", "holds the lock",
    "out of memory",
)  # fmt: skip
PHASES = (
    "rendezvous", "connecting", "reduce-scatter", "all-gather", "broadcast", "barrier", "idle", "shutdown",
)  # fmt: skip
RANKS = (0, 1, 2)
LINKS = ("tcp", "auto")


class Case(NamedTuple):
    """One job in which one rank fails."""

    way: str
    phase: str
    culprit: int
    links: str

    def bound_s(self) -> float:
        """Return how long the others may take to learn of it."""
        if self.way not in FREEZES:
            return 2.0
        return START_TIMEOUT_S if self.phase == "rendezvous" else DEAD_AFTER_S + 2.0


ALL = [Case(*values) for values in itertools.product(WAYS, PHASES, RANKS, LINKS)]
SELECTED = [
    Case(way, phase, (w + p) % 3, LINKS[(w // 2 + p) % 2])
    for w, way in enumerate(WAYS)
    for p, phase in enumerate(PHASES)
]


def run(case: Case) -> Launched:
    """The job, over."""
    env = {
        "RINGCOMM_DEAD_AFTER": str(DEAD_AFTER_S),
        "RINGCOMM_START_TIMEOUT": str(START_TIMEOUT_S),
        "RINGCOMM_TRANSPORT": case.links,
    }
    launched = Launched("-np", "3", "--verbose", str(PROGRAM), *map(str, case[:3]), env=env)
    launched.finish(60.0)
    return launched


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = ALL if metafunc.config.getoption("--all-kills") else SELECTED
        metafunc.parametrize("case", cases, ids=["-".join(map(str, case)) for case in cases])


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Dict[Case, Any]]:
    """The jobs of all tests of this session, running in the background."""
    wanted: List[Case] = [
        item.callspec.params["case"]
        for item in request.session.items
        if getattr(item, "callspec", None) is not None and "case" in item.callspec.params
        and isinstance(item.callspec.params["case"], Case)
    ]  # fmt: skip
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {case: pool.submit(run, case) for case in wanted}
        yield running
        for future in running.values():
            future.cancel()


def check_nothing_is_left(done: Launched) -> None:
    """No file, no named socket, no shared memory. That no process is left `Launched` sees to; what else a
    process had open, the system closes with it."""
    assert not [path.name for path in done.temporary.rglob("*")]
    assert not [path.name for path in Path("/dev/shm").iterdir() if "ring" in path.name]


def told_ranks(case: Case) -> Sequence[int]:
    """The ranks that get an error: the others, and a culprit that lacks memory while it connects."""
    is_told = (case.way, case.phase) == ("out of memory", "connecting")
    return [rank for rank in RANKS if rank != case.culprit or is_told]


@pytest.mark.timeout(600)
@pytest.mark.cases(8)
def test_all_ranks_name_the_culprit(jobs: Dict[Case, Any], case: Case) -> None:
    done: Launched = jobs[case].result()
    check_nothing_is_left(done)
    if case.phase == "shutdown" and case.way == "sys.exit(0)":
        assert done.process.returncode == 0  # That is how programs end.
        return
    assert done.process.returncode not in (0, None), done.out + done.err
    assert f"rank {case.culprit}" in done.err, done.err
    if case.phase == "shutdown":
        return  # The others have nothing more to wait for, and end in peace.
    failed_s: Optional[str] = next(iter(re.findall(r"FAILS (\S+)", done.out)), None)
    assert failed_s is not None, done.out
    errors = {int(rank): rest for rank, *rest in re.findall(r":(\d)\] SURVIVOR (\w+) (\S+) (.*)", done.out)}
    assert sorted(errors) == list(told_ranks(case)), done.out + done.err
    took_s = {rank: float(at_s) - float(failed_s) for rank, (_, at_s, _) in errors.items()}
    print(f"{'-'.join(map(str, case))}: {max(took_s.values()):.2f} s")
    for kind, _, text in errors.values():
        assert kind in KINDS[case.phase], (kind, text)
        assert f"rank {case.culprit}" in text.lower(), text
    assert max(took_s.values()) < case.bound_s() + SLOW_MACHINE_S, took_s


LOST = ("PeerLostError", "PeerStalledError")
KINDS = {
    **dict.fromkeys(PHASES, LOST),
    "rendezvous": ("StartupError", "StartTimeoutError"),
    "connecting": (*LOST, "StartupError", "StartTimeoutError"),
}


def test_every_two_values_meet_in_the_selection() -> None:
    for one, other in itertools.combinations(range(4), 2):
        assert {(case[one], case[other]) for case in SELECTED} == {(case[one], case[other]) for case in ALL}
