"""ringcomm.keras between real processes, on each backend: any number of ranks trains the same model."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Dict

import numpy as np
import pytest

from tests.adapters.jobs import InTurn, run_in_turn

BACKENDS = [
    pytest.param(name, marks=[pytest.mark.xdist_group(f"keras-{name}"), *marks])
    for name, marks in (("tensorflow", ()), ("torch", [pytest.mark.release]), ("jax", [pytest.mark.release]))
]
RANKS = (1, 3)
pytestmark = pytest.mark.timeout(600)


def train() -> Dict[str, Any]:
    from tests.adapters.keras import training

    return training.work()


def train_on_balanced_data() -> Dict[str, Any]:
    from tests.adapters.keras import balanced

    return balanced.work()


@lru_cache(maxsize=None)
def outcomes_on(backend: str) -> InTurn:
    """Both kinds of training, in the same processes: importing a framework takes most of the time."""
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    # XLA compiles dozens of small programs, each of which runs a few times.
    environment = {"KERAS_BACKEND": backend, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    parts = [(function, ranks) for function in (train, train_on_balanced_data) for ranks in RANKS]
    return run_in_turn(parts, **environment)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_ranks_trains_the_same_model(backend: str) -> None:
    alone, *several = [outcomes_on(backend).results(train, ranks) for ranks in RANKS]
    assert alone[0]["accuracy"][-1] > 0.8
    for results in several:
        for result in results:
            for name, wanted in alone[0].items():
                np.testing.assert_allclose(result[name], wanted, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_balanced_data_train_the_same_model_on_any_number_of_ranks(backend: str) -> None:
    """Shares such as 12 and 4, or 12, 0 and 4, come to what one rank comes to with global batches."""
    alone, *several = [outcomes_on(backend).results(train_on_balanced_data, ranks) for ranks in RANKS]
    for results in several:
        for result in results:
            for name, (weights, loss, distance) in result.items():
                np.testing.assert_allclose(weights, alone[0][name][0], rtol=1e-12, atol=1e-13)
                np.testing.assert_allclose(loss, alone[0][name][1], rtol=1e-12)
                np.testing.assert_allclose(distance, alone[0][name][2], rtol=1e-12)


def train_with_keras_2() -> Dict[str, Any]:
    from tests.adapters.keras import legacy

    return legacy.work()


@pytest.mark.release
def test_any_number_of_ranks_trains_the_same_model_of_keras_2() -> None:
    if find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    found = run_in_turn([(train_with_keras_2, ranks) for ranks in RANKS], TF_USE_LEGACY_KERAS="1")
    alone, *several = [found.results(train_with_keras_2, ranks) for ranks in RANKS]
    assert alone[0]["accuracy"][-1] > 0.8
    for results in several:
        for result in results:
            for name, wanted in alone[0].items():
                np.testing.assert_allclose(result[name], wanted, rtol=1e-4)
