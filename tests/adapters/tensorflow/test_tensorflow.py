"""ringcomm.tensorflow between real processes: collectives, errors and training.

On two ranks the same processes then check Keras on TensorFlow (``tests/adapters/keras/reductions.py``): to
import TensorFlow takes each of them seconds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Dict

import pytest

from tests.adapters.jobs import InTurn, check_outcomes, run_checks, run_in_turn

CHECKS = [
    f"tests.adapters.tensorflow.checks_{subject}" for subject in ("collectives", "training", "balanced")
]
pytestmark = pytest.mark.timeout(600)


def run_all_checks() -> Dict[str, str]:
    return run_checks(CHECKS)


def reduce_with_keras() -> bool:
    from tests.adapters.keras import reductions

    return reductions.work()


@lru_cache(maxsize=None)
def outcomes_on_two_ranks() -> InTurn:
    parts = [(run_all_checks, 2), (reduce_with_keras, 2)]
    return run_in_turn(parts, KERAS_BACKEND="tensorflow")


class TestOnTwoRanks:
    """What the quick run takes, too, in one start of each process."""

    pytestmark = [pytest.mark.smoke, pytest.mark.xdist_group("tensorflow-2")]

    def test_collectives_and_training(self) -> None:
        check_outcomes(outcomes_on_two_ranks().results(run_all_checks, 2))

    def test_keras(self) -> None:
        assert outcomes_on_two_ranks().results(reduce_with_keras, 2) == [True] * 2


@lru_cache(maxsize=None)
def outcomes_on_three_processes() -> InTurn:
    return run_in_turn([(run_all_checks, 3), (run_all_checks, 1)])


@pytest.mark.release
@pytest.mark.xdist_group("tensorflow-3")
@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_and_training_on_other_numbers_of_ranks(ranks: int) -> None:
    """In the same three processes, one job after the other."""
    check_outcomes(outcomes_on_three_processes().results(run_all_checks, ranks))
