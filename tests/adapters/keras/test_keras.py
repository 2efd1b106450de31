"""ringcomm.keras between real processes, on each backend: any number of ranks trains the same model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Dict

import numpy as np
import pytest

from tests.adapters.jobs import run

BACKENDS = ["tensorflow", "torch", "jax"]


def work(all_of_it: bool) -> Dict[str, Any]:
    from tests.adapters.keras import training

    return training.work(all_of_it)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_ranks_trains_the_same_model(backend: str) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    alone, *several = [run(work, (ranks == 2,), ranks, KERAS_BACKEND=backend) for ranks in (1, 2, 3)]
    assert alone[0]["accuracy"][-1] > 0.8
    for results in several:
        for result in results:
            np.testing.assert_allclose(result["loss"], alone[0]["loss"], rtol=1e-5)
            np.testing.assert_allclose(result["accuracy"], alone[0]["accuracy"], rtol=1e-5)
            for name in {"accumulated", "clipped"} & set(result):
                np.testing.assert_allclose(result[name], alone[0][name], rtol=1e-4)


def work_with_keras_2() -> Dict[str, Any]:
    from tests.adapters.keras import legacy

    return legacy.work()


@pytest.mark.timeout(240)
def test_any_number_of_ranks_trains_the_same_model_of_keras_2() -> None:
    if find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    alone, *several = [run(work_with_keras_2, (), ranks, TF_USE_LEGACY_KERAS="1") for ranks in (1, 2, 3)]
    assert alone[0]["accuracy"][-1] > 0.8
    for results in several:
        for result in results:
            for name, wanted in alone[0].items():
                np.testing.assert_allclose(result[name], wanted, rtol=1e-4)


def work_balanced() -> Dict[str, Any]:
    from tests.adapters.keras import balanced

    return balanced.work()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", BACKENDS)
def test_balanced_data_train_the_same_model_on_any_number_of_ranks(backend: str) -> None:
    """Shares such as 12 and 4, or 12, 0 and 4, come to what one rank comes to with global batches."""
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    alone, *several = [run(work_balanced, (), ranks, KERAS_BACKEND=backend) for ranks in (1, 2, 3)]
    for results in several:
        for result in results:
            for name, (weights, loss, distance) in result.items():
                np.testing.assert_allclose(weights, alone[0][name][0], rtol=1e-12, atol=1e-13)
                np.testing.assert_allclose(loss, alone[0][name][1], rtol=1e-12)
                np.testing.assert_allclose(distance, alone[0][name][2], rtol=1e-12)
