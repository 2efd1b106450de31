"""ringcomm.keras between real processes, on each backend: any number of ranks trains the same model."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Dict

import numpy as np
import pytest

from tests.adapters.jobs import InTurn, run, run_in_turn
from tests.adapters.signatures import differences, differences_of_options

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
    from tests.adapters.keras import training

    return training.work_on_balanced_data()


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
                np.testing.assert_allclose(weights, alone[0][name][0], rtol=1e-3, atol=1e-4)
                np.testing.assert_allclose([loss, distance], alone[0][name][1:], rtol=1e-3)


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


def reduce_on_two_ranks() -> bool:
    from tests.adapters.keras import reductions

    return reductions.work()


@pytest.mark.smoke
@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.release), "jax"])
def test_reductions_on_two_ranks(backend: str) -> None:
    """On TensorFlow they are in processes of ``tests/adapters/tensorflow/test_tensorflow.py``."""
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    assert run(reduce_on_two_ranks, (), 2, KERAS_BACKEND=backend) == [True] * 2


LIKE_HOROVODS = """
init(comm=None, process_sets=None)
start_timeline(file_path, mark_cycles=False)
DistributedOptimizer(optimizer, name=None, device_dense=, device_sparse=, compression=none, sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=global, scale_local_gradients=True)
load_model(filepath, custom_optimizers=None, custom_objects=None, compression=none, legacy_opts=False)
allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None)
allgather(value, name=None)
broadcast(value, root_rank, name=None)
reducescatter(value, name=None, op=Average)
callbacks.BroadcastGlobalVariablesCallback(root_rank, device=, local_variables=None)
callbacks.MetricAverageCallback(device=)
callbacks.LearningRateScheduleCallback(initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True, steps_per_epoch=None)
callbacks.LearningRateWarmupCallback(initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0)
callbacks.BestModelCheckpoint(monitor=val_loss, verbose=0, mode=auto, save_freq=epoch)
elastic.run(func)
elastic.KerasState(model, optimizer=None)
elastic.CommitStateCallback(state, batches_per_commit=1)
elastic.UpdateBatchStateCallback(state)
elastic.UpdateEpochStateCallback(state)
"""  # noqa: E501


def test_signatures() -> None:
    import ringcomm.keras
    import ringcomm.tensorflow.keras

    assert differences(ringcomm.keras, LIKE_HOROVODS) == []
    assert differences(ringcomm.tensorflow.keras, LIKE_HOROVODS) == []
    assert differences_of_options(ringcomm.keras, "ringcomm.keras") == []
    assert differences_of_options(ringcomm.tensorflow.keras, "ringcomm.keras") == []
