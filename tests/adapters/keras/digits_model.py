"""A model on handwritten digits, of Keras 2 and of Keras 3, and this rank's part of the data."""

from __future__ import annotations

from typing import Any, List

import numpy as np

import ringcomm as rc
from tests.adapters import digits
from tests.adapters.jobs import same_everywhere

STEPS = 6


def my_part() -> List[Any]:
    """This rank's rows of each global batch, so that the global batches are the same on any number."""
    parts = [digits.samples(step, rc.rank(), rc.size()) for step in range(STEPS)]
    return [np.concatenate(arrays) for arrays in zip(*parts)]


def make(keras: Any, optimizer: Any, **options: Any) -> Any:
    """A model with different weights on every rank, until rank 0's are broadcast."""
    model = keras.Sequential([
        keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)
    ])  # fmt: skip
    draw = np.random.default_rng(rc.rank())
    model.set_weights([draw.normal(size=item.shape) * 0.1 for item in model.get_weights()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"], **options)
    return model


def fit(hvd: Any, model: Any, images: Any, labels: Any, *more: Any, epochs: int = 1) -> Any:
    begin = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(
        images, labels, batch_size=digits.GLOBAL_BATCH // rc.size(), epochs=epochs, shuffle=False, verbose=0,
        callbacks=[*begin, *more],
    ).history  # fmt: skip
    same_everywhere(np.concatenate([np.ravel(item) for item in model.get_weights()]))
    return history
