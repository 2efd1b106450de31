"""Training on balanced data, with the backend that the environment names: the same on any number of ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List

import keras
import numpy as np

import ringcomm.keras as hvd
from tests.adapters.jobs import same_everywhere
from tests.support.errors import raises

SPEEDS = {1: [1], 2: [3, 1], 3: [3, 0, 1]}
COUNT, GLOBAL_BATCH, EPOCHS = 200, 16, 2


def data() -> Any:
    draw = np.random.default_rng(5)
    inputs = draw.normal(size=(COUNT, 8))
    return inputs, np.sign(inputs.sum(1, keepdims=True))


def trained(optimizer: Any, speeds: Any) -> List[Any]:
    inputs, labels = data()
    dataset = hvd.BalancedDataset(inputs, labels, GLOBAL_BATCH, seed=3, speeds=speeds)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
    )
    draw = np.random.default_rng(1)
    model.set_weights([draw.normal(size=item.shape) * 0.3 for item in model.get_weights()])
    model.compile(hvd.DistributedOptimizer(optimizer, batches=dataset), loss="mse", metrics=["mae"])
    metrics = hvd.callbacks.MetricAverageCallback()
    history = model.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=[metrics]).history
    assert dataset.state_dict()["epoch"] == EPOCHS
    whole = np.concatenate([np.ravel(item) for item in model.get_weights()])
    same_everywhere(whole)
    return [whole, history["loss"], history["mae"]]


@contextmanager
def layers_of_float64() -> Iterator[None]:
    """Models that are made meanwhile have variables of float64. The next job of this process has others."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


@contextmanager
def computing_in_float64() -> Iterator[None]:
    """Keras computes matrix products, means, quotients and more in float32 with PyTorch and JAX, also if all
    its operands are float64: a table replaces types of 64 bits.
    """
    from keras.src.backend.common import dtypes

    before = dict(dtypes.BIT64_TO_BIT32_DTYPE)
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    use_types_of_jax(64)
    try:
        yield
    finally:
        dtypes.BIT64_TO_BIT32_DTYPE.update(before)
        use_types_of_jax(32)


def use_types_of_jax(bits: int) -> None:
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", bits == 64)


def difference_of_two_halves() -> float:
    """Return how far gradients of two halves of a batch are from those of the batch, in one process without
    ringcomm: relative to the largest one.
    """
    import torch

    inputs, labels = (torch.from_numpy(array[:24]) for array in data())
    layers = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])

    def gradients(first: int, last: int) -> Any:
        model.zero_grad()
        keras.losses.MeanSquaredError()(labels[first:last], model(inputs[first:last])).backward()
        return [variable.value.grad.numpy().copy() for variable in model.trainable_variables]

    parts = zip(gradients(0, 18), gradients(18, 24), gradients(0, 24))
    return max(abs((18 * a + 6 * b) / 24 - whole).max() / abs(whole).max() for a, b, whole in parts)


def work() -> Dict[str, Any]:
    """Weights and metrics after training with several optimizers."""
    hvd.init()
    with layers_of_float64():
        with_float32 = 0.0
        if keras.backend.backend() == "torch" and hvd.size() == 1:
            with_float32 = difference_of_two_halves()
        with computing_in_float64():
            results = trained_with_every_optimizer()
            if with_float32:
                assert difference_of_two_halves() < 1e-14 < 1e-9 < with_float32, with_float32
    hvd.shutdown()
    return results


def trained_with_every_optimizer() -> Dict[str, Any]:
    speeds = SPEEDS[hvd.size()]
    results: Dict[str, Any] = {
        "sgd": trained(keras.optimizers.SGD(0.1), speeds),
        "momentum": trained(keras.optimizers.SGD(0.1, momentum=0.9), speeds),
        "adam": trained(keras.optimizers.Adam(0.01), speeds),
    }
    if hvd.size() == 2:
        trained(keras.optimizers.SGD(0.1), "measure")
        not_weighted()
    return results


def not_weighted() -> None:
    inputs, labels = data()
    dataset = hvd.BalancedDataset(inputs, labels, GLOBAL_BATCH)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    # TensorFlow makes an error of its own of the ConfigError.
    raises(Exception, lambda: model.fit(dataset, verbose=0), "batches=data")
