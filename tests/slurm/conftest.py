"""Fixtures for tests with a real Slurm and a real mpirun.

They need the Debian packages that tests/run.sh installs for its stage `slurm`. Without them the tests are
skipped with the reason; with CI=true or RINGCOMM_REQUIRE_HOSTS=1 they fail with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator, List

import pytest

from tests.hosts.netlab import Lab
from tests.slurm.cluster import Slurm, missing


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Mark every test in this directory with `slurm`."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def slurm_lab() -> Iterator[Lab]:
    """Three hosts."""
    reason = Lab.unavailable()
    lacking = missing()
    if reason is None and lacking:
        reason = f"there is no {', '.join(lacking)} (Debian: apt install slurm-wlm munge openmpi-bin)"
    if reason is not None:
        required = ("CI", "RINGCOMM_REQUIRE_HOSTS")
        if any(os.environ.get(name, "").lower() in ("1", "true") for name in required):
            pytest.fail(f"cannot run a Slurm here, and that is required: {reason}", pytrace=False)
        pytest.skip(f"cannot run a Slurm here: {reason}")
    with Lab("jetson1", "jetson2", "jetson3") as lab:
        yield lab


@pytest.fixture(scope="session")
def slurm(slurm_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm whose nodes are these hosts."""
    with Slurm(slurm_lab, tmp_path_factory.mktemp("slurm")) as running:
        yield running
