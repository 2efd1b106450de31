"""Programs from seeds: those that all ranks agree about give what each works out alone, others fail alike.

    python -m pytest tests/fuzz/test_programs.py --programs 2000 --timeout 0

runs 2,000 of each kind. A failure names the seed of its program, with which it runs again: those of the first
test by ``ringrun -np 3 python -m tests.fuzz.agreeing SEED 1 FAMILY``.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.fuzz import diverging
from tests.proc.test_ringrun_support import Launched

FAMILIES = ["numpy", "weight", "facts"]
EACH_S = 0.5
"""How long a program may take in the mean, on a machine that does a lot else."""


@pytest.fixture
def programs(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--programs"))


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.release), 3])
def test_all_ranks_agree(size: int, programs: int) -> None:
    families = FAMILIES if importlib.util.find_spec("torch") is not None else FAMILIES[:2]
    job = Launched(
        "-np", str(size), "-x", "OMP_NUM_THREADS=1", "--late-after", "60", sys.executable, "-W", "ignore",
        "-m", "tests.fuzz.agreeing", str(size * 1_000_000), str(programs), *families,
    )  # fmt: skip
    code = job.finish(90.0 + EACH_S * programs * len(families))
    print(job.out, job.err)
    assert code == 0
    assert all(f"{programs} programs of family {family}" in job.out for family in families)


@pytest.mark.release
@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("by_name", [False, True], ids=["calls", "by name"])
def test_one_rank_differs(by_name: bool, transport: str, programs: int) -> None:
    run = diverging.run_by_name if by_name else diverging.run_direct
    tried = set()
    for seed in range(programs // 2):
        case = diverging.program(seed, by_name)
        tried.add(case.change)
        try:
            run(case, transport)
        except BaseException as problem:
            raise AssertionError(f"program {seed}, by_name={by_name}, over {transport}: {case}") from problem
    assert programs < 40 or len(tried) > 4
