"""Programs from seeds that all ranks agree about: they give what each rank works out alone.

    python -m pytest tests/fuzz/test_programs.py --programs 2000 --timeout 0

runs 2,000 of each kind. A failure names the seed of its program, with which it runs again:
``ringrun -np 3 python -m tests.fuzz.agreeing SEED 1 FAMILY``.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

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
