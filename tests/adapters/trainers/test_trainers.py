"""The strategies for Lightning and Fabric in both distributions, Lightning's own launcher, and the warning of
ranks that train alone with Accelerate. The examples are in ``tests/hosts/test_trainers.py``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.proc.test_ringrun_support import ROOT, Launched
from tests.support.programs import run_python

pytest.importorskip("lightning", reason="needs Lightning: bash tests/run.sh --only trainers")

HERE = Path(__file__).parent
LIMIT_S = 240.0
ENVIRON = {"OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.timeout(300)


def under_ringrun(*command: str) -> str:
    """Return what two ranks print on both streams."""
    job = Launched("-np", "2", "--start-timeout", "200", *command, cwd=ROOT, env=ENVIRON)
    assert job.finish(LIMIT_S) == 0, f"{job.out}\n{job.err}"
    return job.out + job.err


@pytest.mark.smoke
@pytest.mark.cases(1)
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_strategies(package: str) -> None:
    pytest.importorskip(package)
    assert under_ringrun(str(HERE / "lightning_checks.py"), package).count("all is as it has to be") == 2


def test_lightning_starts_the_processes() -> None:
    output = run_python(HERE / "lightning_starts.py", limit_s=LIMIT_S)
    assert sorted(re.findall(r"rank (\d) of 2 over ringcomm", output)) == ["0", "1"], output
