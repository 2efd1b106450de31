"""What every rank does with a model of Keras 2, as ``tf.keras`` and through ``ringcomm.tensorflow.keras``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow.keras as hvd
from ringcomm.errors import NotOfferedError
from tests.adapters.jobs import same_everywhere

keras = tf.keras
GLOBAL_BATCH, STEPS, EPOCHS = 96, 6, 3


def work() -> Dict[str, List[float]]:
    """What a run on any number of ranks must come to."""
    hvd.init()
    assert keras.Model.__module__.startswith("tf_keras."), keras.Model.__module__
    images, labels = my_part()
    results = {}
    for name, optimizer in (
        ("adam", keras.optimizers.Adam(0.01)),
        ("clipped", keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.3)),
        ("legacy", keras.optimizers.legacy.SGD(0.1, momentum=0.9)),
    ):
        model = make(hvd.DistributedOptimizer(optimizer))
        history = fit(model, images, labels, epochs=EPOCHS)
        results[name] = history["loss"]
        if name == "adam":
            results["accuracy"] = history["accuracy"]
            saved_and_loaded(model, images, labels)
    callbacks(images, labels)
    elastic(images, labels)
    hvd.shutdown()
    return results


def my_part() -> Any:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = np.arange(STEPS * GLOBAL_BATCH).reshape(STEPS, hvd.size(), -1)[:, hvd.rank()].ravel()
    return (images[rows] / 16).astype("float32"), labels[rows].astype("int64")


def make(optimizer: Any) -> Any:
    model = keras.Sequential([
        keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)
    ])  # fmt: skip
    draw = np.random.default_rng(hvd.rank())
    model.set_weights([draw.normal(size=item.shape) * 0.1 for item in model.get_weights()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return model


def fit(model: Any, images: Any, labels: Any, *more: Any, epochs: int = 1) -> Any:
    begin = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(
        images, labels, batch_size=GLOBAL_BATCH // hvd.size(), epochs=epochs, shuffle=False, verbose=0,
        callbacks=[*begin, *more],
    ).history  # fmt: skip
    same_everywhere(np.concatenate([np.ravel(item) for item in model.get_weights()]))
    return history


def saved_and_loaded(model: Any, images: Any, labels: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "model.keras")
        model.save(path)
        plain, loaded = keras.models.load_model(path), hvd.load_model(path)
    assert not hasattr(plain.optimizer, "_reducer")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert int(loaded.optimizer.iterations) == EPOCHS * STEPS
    again, further = fit(loaded, images, labels), fit(model, images, labels)
    np.testing.assert_allclose(again["loss"], further["loss"], rtol=1e-5)


def callbacks(images: Any, labels: Any) -> None:
    try:
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    except NotOfferedError:
        pass
    else:
        raise AssertionError("gradients were said to be accumulated")
    model = make(hvd.DistributedOptimizer(keras.optimizers.SGD(0.3), compression=hvd.Compression.fp16))
    warm = hvd.callbacks.LearningRateWarmupCallback(0.3, warmup_epochs=2)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "best.keras"
        best = hvd.callbacks.BestModelCheckpoint("loss", filepath=str(path))
        history = fit(model, images, labels, warm, best, epochs=3)
        assert path.exists() == (hvd.rank() == 0)
    assert history["loss"][-1] < history["loss"][0]
    np.testing.assert_allclose(history["lr"][-1], 0.3, rtol=1e-5)


def elastic(images: Any, labels: Any) -> None:
    model = make(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    fit(model, images, labels, hvd.elastic.UpdateEpochStateCallback(state), epochs=1)
    state.commit()
    kept = [item.numpy() for item in [*model.variables, *model.optimizer.variables]]
    fit(model, images, labels)
    state.restore()
    for item, wanted in zip([*model.variables, *model.optimizer.variables], kept):
        np.testing.assert_array_equal(item.numpy(), wanted)
    assert state.epoch == 1 and len(kept) > 8
