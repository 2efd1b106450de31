"""Training on balanced data, with the backend that the environment names: the same on any number of ranks."""

from __future__ import annotations

from typing import Any, Dict, List

import keras
import numpy as np

import ringcomm.keras as hvd
from ringcomm.errors import ConfigError
from tests.adapters.jobs import same_everywhere

SPEEDS = {1: [1], 2: [3, 1], 3: [3, 0, 1]}
EXACT_SPEEDS = {1: [1], 2: [1, 0], 3: [2, 1, 1]}
"""Shares that are powers of two: by other numbers Keras divides in float32 with PyTorch and JAX."""
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


def work() -> Dict[str, Any]:
    """Weights and metrics after training with several optimizers."""
    hvd.init()
    keras.config.set_floatx("float64")
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    speeds = (SPEEDS if keras.backend.backend() == "tensorflow" else EXACT_SPEEDS)[hvd.size()]
    results = {
        "momentum": trained(keras.optimizers.SGD(0.1, momentum=0.9), speeds),
        "adam": trained(keras.optimizers.Adam(0.01), speeds),
    }
    if hvd.size() == 2:
        trained(keras.optimizers.SGD(0.1), "measure")
        not_weighted()
    hvd.shutdown()
    return results


def not_weighted() -> None:
    inputs, labels = data()
    dataset = hvd.BalancedDataset(inputs, labels, GLOBAL_BATCH)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    try:
        model.fit(dataset, verbose=0)
    except ConfigError as error:
        assert "batches=data" in str(error), error
    except Exception as error:  # noqa: BLE001 - TensorFlow has made an error of its own of it
        assert "batches=data" in str(error), error
    else:
        raise AssertionError("gradients were not weighted, and nothing was said")
