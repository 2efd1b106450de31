"""The checks that every rank runs with a Keras model, on the backend that the environment names."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Tuple

import keras
import numpy as np

import ringcomm.keras as hvd
from ringcomm.errors import PeerLostError
from tests.adapters.digits import GLOBAL_BATCH
from tests.adapters.jobs import same_everywhere
from tests.adapters.keras import digits_model
from tests.adapters.keras.digits_model import STEPS, my_part

EPOCHS = 3
make, fit = partial(digits_model.make, keras), partial(digits_model.fit, hvd)


def work() -> Dict[str, Any]:
    """Return what a run on any number of ranks must come to; on three ranks also check what they share."""
    hvd.init()
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    images, labels = my_part()
    results: Dict[str, Any] = {}
    results["loss"], results["accuracy"], model = trained(images, labels)
    averaged = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    results["accumulated"] = weights_after(images, labels, keras.optimizers.SGD(0.1), **averaged)
    # Gradients are clipped by the norm of the averaged gradient, not by that of each rank's own.
    clipping = keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.3)
    results["clipped"] = weights_after(images, labels, clipping, gradient_predivide_factor=2.0)
    if hvd.size() > 1:
        sums = weights_after(images, labels, keras.optimizers.SGD(0.05), backward_passes_per_step=2)
        np.testing.assert_allclose(sums, results["accumulated"], rtol=1e-4)
        saved_and_loaded(model, images, labels)
        for check in (compressed, half_precision, parts_of_one_rank, callbacks, elastic):
            check(images, labels)
        made_from_a_configuration()
    hvd.shutdown()
    return results


def trained(images: Any, labels: Any) -> Tuple[List[float], List[float], Any]:
    model = make(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    history = fit(model, images, labels, epochs=EPOCHS)
    assert hvd.allgather_object(history) == [history] * hvd.size()
    return history["loss"], history["accuracy"], model


def weights_after(images: Any, labels: Any, optimizer: Any, **options: Any) -> List[float]:
    model = make(hvd.DistributedOptimizer(optimizer, **options))
    fit(model, images, labels)
    return [float(np.abs(item).sum()) for item in model.get_weights()]


def saved_and_loaded(model: Any, images: Any, labels: Any) -> None:
    """A saved optimizer is Keras's own; loaded by ringcomm it is distributed again, with its state."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "model.keras")
        model.save(path)
        plain = keras.models.load_model(path)
        loaded = hvd.load_model(path)
    assert type(plain.optimizer) is not type(model.optimizer)
    # Each distributed optimizer has a class of its own, by which from_config() finds its options.
    assert type(loaded.optimizer).__bases__ == type(model.optimizer).__bases__, type(loaded.optimizer).__mro__
    for mine, theirs in zip(model.optimizer.variables, loaded.optimizer.variables):
        assert np.array_equal(keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(theirs))
    again, further = fit(loaded, images, labels), fit(model, images, labels)
    np.testing.assert_allclose(again["loss"], further["loss"], rtol=1e-5)


def compressed(images: Any, labels: Any) -> None:
    """Residuals are saved and loaded, and dropped where only the optimizer's state is loaded."""
    for compression in (hvd.Compression.fp16, hvd.Compression.int8):
        model = make(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression))
        history = fit(model, images, labels, epochs=2)
        assert history["loss"][1] < history["loss"][0]
    saved = hvd.residual_state_dict(model.trainable_variables)
    state: Dict[str, Any] = {}
    model.optimizer.save_own_variables(state)
    model.optimizer.load_own_variables(state)
    dropped = hvd.residual_state_dict(model.trainable_variables)
    assert dropped.keys() == saved.keys() and not any(item.any() for item in dropped.values())
    hvd.load_residual_state_dict(model.trainable_variables, saved)
    for name, array in hvd.residual_state_dict(model.trainable_variables).items():
        assert array.tobytes() == saved[name].tobytes()


def half_precision(images: Any, labels: Any) -> None:
    """If a gradient is NaN on one rank, all ranks skip the step."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    spoilt = images.copy()
    if hvd.rank() == 0:
        spoilt[GLOBAL_BATCH // hvd.size()] = np.inf
    fit(model, spoilt, labels, epochs=2)
    assert all(np.isfinite(item).all() for item in model.get_weights())


def made_from_a_configuration() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))  # another one of the same class
    again = type(optimizer).from_config(optimizer.get_config())
    variable = keras.Variable(1.0)
    again.build([variable])
    again.apply([keras.ops.convert_to_tensor(hvd.rank() + 1.0)], [variable])
    assert float(keras.ops.convert_to_numpy(variable)) == 1.0 - sum(range(1, hvd.size() + 1))


def parts_of_one_rank(images: Any, labels: Any) -> None:
    """Local layers stay different; the rest becomes the same."""
    model = make("sgd")
    local = model.layers[-1]
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[local])
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local.trainable_weights)
    model.fit(images, labels, batch_size=GLOBAL_BATCH // hvd.size(), verbose=0, callbacks=[begin])
    for weights in model.layers[0].get_weights():
        same_everywhere(weights)
    found = hvd.allgather_object(local.get_weights()[0].tobytes())
    assert len(set(found)) == hvd.size()


class Rates(keras.callbacks.Callback):
    """Notes the learning rate of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: List[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))


def callbacks(images: Any, labels: Any) -> None:
    size = hvd.size()
    rates, model = Rates(), make(hvd.DistributedOptimizer(keras.optimizers.SGD(0.3, momentum=0.5)))
    warm = hvd.callbacks.LearningRateWarmupCallback(0.3, warmup_epochs=2)
    halved = hvd.callbacks.LearningRateScheduleCallback(0.3, lambda epoch: 0.5**epoch, start_epoch=3)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "best.keras"
        best = hvd.callbacks.BestModelCheckpoint("loss", filepath=str(path))
        history = fit(model, images, labels, warm, halved, best, rates, epochs=5)
        assert path.exists() == (hvd.rank() == 0)
    rising = [0.3 / size * (epoch * (size - 1) / 2 + 1) for epoch in np.arange(0, 2, 1 / STEPS)]
    expected = rising + [0.3] * STEPS + [0.3 / 8] * STEPS + [0.3 / 16] * STEPS
    np.testing.assert_allclose(rates.rates, expected, rtol=1e-5)
    np.testing.assert_allclose(history["lr"][-1], 0.3 / 16, rtol=1e-5)
    assert model.optimizer.momentum == 0.5
    logs = {"loss": float(hvd.rank()), "name": "not a number"}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (size - 1) / 2, "name": "not a number"}
    hvd.callbacks.MetricAverageCallback(log_stats=True).on_epoch_end(0, logs)
    assert logs["ringcomm/elapsed_s"] > 0.0 and logs["ringcomm/calls"] >= (size > 1)


class Loses(keras.callbacks.Callback):
    """Raises PeerLostError on all ranks in the third batch of the second epoch, a batch after a commit."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.kept: List[Any] = []
        self.lost = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.state.epoch == 1 and batch == 1 and not self.lost:
            self.kept = everything_of(self.model)
        if self.state.epoch == 1 and batch == 2 and not self.lost:
            self.lost = True
            raise PeerLostError("a rank is lost")


def everything_of(model: Any) -> List[Any]:
    return [keras.ops.convert_to_numpy(item).copy() for item in [*model.weights, *model.optimizer.variables]]


def elastic(images: Any, labels: Any) -> None:
    """After a loss the committed state is restored, and training continues from it."""
    model = make(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    assert state.model is model and state.optimizer is model.optimizer
    state.sync()
    loses = Loses(state)
    updates = [
        hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2), loses,
    ]  # fmt: skip
    begun: List[Any] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        begun.append((state.epoch, state.batch))
        if len(begun) == 2:
            for found, kept in zip(everything_of(model), loses.kept):
                np.testing.assert_array_equal(found, kept)
        fit(model, images, labels, *updates, epochs=EPOCHS - state.epoch)

    train(state)
    assert begun == [(0, 0), (1, 1)] and (state.epoch, state.batch) == (EPOCHS, 0)
    assert len(loses.kept) > len(model.weights)


# ---- balanced data: training is the same on any number of ranks ------------------------------------

SPEEDS = {1: [1], 2: [3, 1], 3: [3, 0, 1]}


def balanced_data(**options: Any) -> Any:
    inputs = np.random.default_rng(5).normal(size=(200, 8))
    return hvd.BalancedDataset(inputs, np.sign(inputs.sum(1, keepdims=True)), 16, seed=3, **options)


def trained_on_balanced_data(optimizer: Any, speeds: Any) -> List[Any]:
    dataset = balanced_data(speeds=speeds)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
    )
    draw = np.random.default_rng(1)
    model.set_weights([draw.normal(size=item.shape) * 0.3 for item in model.get_weights()])
    model.compile(hvd.DistributedOptimizer(optimizer, batches=dataset), loss="mse", metrics=["mae"])
    metrics = hvd.callbacks.MetricAverageCallback()
    history = model.fit(dataset, epochs=2, verbose=0, callbacks=[metrics]).history
    assert dataset.state_dict()["epoch"] == 2
    whole = np.concatenate([np.ravel(item) for item in model.get_weights()])
    same_everywhere(whole)
    return [whole, history["loss"], history["mae"]]


def work_on_balanced_data() -> Dict[str, Any]:
    """Weights and metrics after training with several optimizers."""
    hvd.init()
    speeds = SPEEDS[hvd.size()]
    results: Dict[str, Any] = {
        "momentum": trained_on_balanced_data(keras.optimizers.SGD(0.1, momentum=0.9), speeds),
        "adam": trained_on_balanced_data(keras.optimizers.Adam(0.01), speeds),
    }
    if hvd.size() > 1:
        trained_on_balanced_data(keras.optimizers.SGD(0.1), "measure")
    hvd.shutdown()
    return results
