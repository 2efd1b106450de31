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


def data(**options: Any) -> Any:
    draw = np.random.default_rng(5)
    inputs = draw.normal(size=(COUNT, 8))
    return hvd.BalancedDataset(inputs, np.sign(inputs.sum(1, keepdims=True)), GLOBAL_BATCH, seed=3, **options)


def trained(optimizer: Any, speeds: Any) -> List[Any]:
    dataset = data(speeds=speeds)
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
def computing_in_float64() -> Iterator[None]:
    """Models that are made meanwhile have variables of float64. The next job of this process has others.

    Keras computes matrix products, means, quotients and more in float32 with PyTorch and JAX, also if all its
    operands are float64: a table replaces types of 64 bits.
    """
    from keras.src.backend.common import dtypes

    table, floatx, policy = (
        dict(dtypes.BIT64_TO_BIT32_DTYPE),
        keras.config.floatx(),
        keras.config.dtype_policy(),
    )
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    use_types_of_jax(64)
    try:
        yield
    finally:
        dtypes.BIT64_TO_BIT32_DTYPE.update(table)
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
        use_types_of_jax(32)


def use_types_of_jax(bits: int) -> None:
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", bits == 64)


def work() -> Dict[str, Any]:
    """Weights and metrics after training with several optimizers."""
    hvd.init()
    speeds = SPEEDS[hvd.size()]
    with computing_in_float64():
        results: Dict[str, Any] = {
            "momentum": trained(keras.optimizers.SGD(0.1, momentum=0.9), speeds),
            "adam": trained(keras.optimizers.Adam(0.01), speeds),
        }
        if hvd.size() > 1:
            trained(keras.optimizers.SGD(0.1), "measure")
            not_weighted()
    hvd.shutdown()
    return results


def not_weighted() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    # TensorFlow makes an error of its own of the ConfigError.
    raises(Exception, lambda: model.fit(data(), verbose=0), "batches=data")
