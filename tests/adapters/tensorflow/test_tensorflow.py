"""ringcomm.tensorflow between real processes: collectives, errors and training."""

from __future__ import annotations

import pytest

from tests.adapters.jobs import run_on

CHECKS = ["tests.adapters.tensorflow.checks_collectives", "tests.adapters.tensorflow.checks_training"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke), 3])
def test_every_rank_finds_everything_in_order(ranks: int) -> None:
    run_on(ranks, CHECKS)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_written_for_horovod_find_what_they_rely_on(ranks: int) -> None:
    run_on(ranks, ["tests.adapters.tensorflow.checks_horovod"])
