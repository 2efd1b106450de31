"""ringcomm.tensorflow between real processes: collectives, errors and training."""

from __future__ import annotations

import pytest

from tests.adapters.jobs import run_on

CHECKS = [f"tests.adapters.tensorflow.checks_{subject}" for subject in ("collectives", "training", "horovod")]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_finds_everything_in_order(ranks: int) -> None:
    run_on(ranks, CHECKS)
