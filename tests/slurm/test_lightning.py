"""Lightning in an allocation of a real Slurm, which has a cluster environment of its own for it."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.hosts.job import EXAMPLES, ROOT
from tests.slurm.cluster import Slurm

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        find_spec("lightning") is None,
        reason="Lightning is not installed here: bash tests/run.sh --only trainers",
    ),
]
RECORDED = ROOT / "tests" / "adapters" / "trainers" / "recorded.py"


def test_lightning_trains_in_an_allocation(slurm: Slurm) -> None:
    """Three ranks on two nodes, no list of hosts; Slurm's variables do not mislead Lightning."""
    options = ["-x", "OMP_NUM_THREADS=1", "--start-timeout", "200"]
    program = [RECORDED, EXAMPLES / "lightning_ddp.py", "--epochs", "1"]
    command = ["salloc", "-N2", "-n3", "ringrun", *options, *program]
    done = slurm.run(*command, timeout_s=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pattern = r"^\[(jetson\d:\d)\] rank (\d): weights have digest (\w{16})"
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    assert [row[:2] for row in sorted(found)] == [("jetson1:0", "0"), ("jetson1:1", "1"), ("jetson2:2", "2")]
    assert len({row[2] for row in found}) == 1, done.stdout
    assert "3 process(es) over ringcomm" in done.stdout, done.stdout
