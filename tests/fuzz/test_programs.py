"""Programs from seeds: those that all ranks agree about give what each works out alone, others fail alike.

    python -m pytest tests/fuzz/test_programs.py --programs 2000 --timeout 0

runs 2,000 of each kind. A failure names the seed of its program, with which it runs again: those of the first
test by ``ringrun -np 3 python -m tests.fuzz.agreeing SEED 1 FAMILY``, those of process groups by ``ringrun
-np 3 python -m tests.fuzz.diverging_group SEED 1``, those of optimizers by ``python -m
tests.fuzz.diverging_optimizer 3 SEED 1``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.fuzz import diverging
from tests.proc.test_ringrun_support import ROOT, SOURCES, Launched

FAMILIES = ["numpy", "weight", "model", "local", "ddp", "recipe", "group", "facts"]
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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.release
def test_one_rank_of_a_process_group_differs(size: int, programs: int) -> None:
    pytest.importorskip("torch")
    job = Launched(
        "-np", str(size), "-x", "OMP_NUM_THREADS=1", sys.executable, "-W", "ignore", "-m",
        "tests.fuzz.diverging_group", str(size * 1_000_000), str(programs // 2),
    )  # fmt: skip
    code = job.finish(90.0 + 2 * EACH_S * programs)
    print(job.out, job.err)
    assert code == 0
    assert f"{programs // 2} programs of one odd rank" in job.out


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.release
def test_one_rank_of_an_optimizer_differs(size: int, programs: int) -> None:
    pytest.importorskip("torch")
    count = programs // 6 if programs < 100 else programs // 2
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
    command = [
        sys.executable, "-W", "ignore", "-m", "tests.fuzz.diverging_optimizer", str(size),
        str(size * 1_000_000), str(count),
    ]  # fmt: skip
    said = subprocess.run(
        command, cwd=ROOT, env={**variables, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=90.0 + 16 * EACH_S * count,
    )  # fmt: skip
    output = said.stdout.decode()
    print(output)
    assert said.returncode == 0
    assert f"{count} programs of one odd optimizer" in output
