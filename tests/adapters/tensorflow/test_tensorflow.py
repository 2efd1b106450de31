"""ringcomm.tensorflow between real processes: collectives, errors and training."""

from __future__ import annotations

import pytest

from tests.adapters.jobs import run_on

CHECKS = [
    "tests.adapters.tensorflow.checks_collectives", "tests.adapters.tensorflow.checks_weights",
    "tests.adapters.tensorflow.checks_balanced", "tests.adapters.tensorflow.checks_training",
    "tests.adapters.tensorflow.checks_compression", "tests.adapters.tensorflow.checks_digits",
]


@pytest.mark.timeout(180)
@pytest.mark.smoke
def test_collectives_and_training_on_two_ranks() -> None:
    run_on(2, CHECKS)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_and_training_on_other_numbers_of_ranks(ranks: int) -> None:
    run_on(ranks, CHECKS)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, 3])
def test_behaviour_that_programs_for_horovod_rely_on(ranks: int) -> None:
    run_on(ranks, ["tests.adapters.tensorflow.checks_horovod"])
