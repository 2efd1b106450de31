"""Reductions, balanced data and diverged weights on two ranks, on the backends torch and JAX of Keras.

On TensorFlow they are in ``tests/adapters/tensorflow/test_tensorflow.py``, in processes of that file.

A test for each backend, not one with a parameter: each covers a module of its own.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.adapters.jobs import run

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(240)]


def work() -> bool:
    from tests.adapters.keras import reductions

    return reductions.work()


def run_on_two_ranks(backend: str) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    assert run(work, (), 2, KERAS_BACKEND=backend) == [True] * 2


@pytest.mark.release
def test_on_torch() -> None:
    run_on_two_ranks("torch")


def test_on_jax() -> None:
    run_on_two_ranks("jax")
