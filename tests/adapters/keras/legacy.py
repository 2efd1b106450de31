"""What every rank does with a model of Keras 2, as ``tf.keras`` and through ``ringcomm.tensorflow.keras``."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd_tf
import ringcomm.tensorflow.keras as hvd
from ringcomm.errors import ConfigError
from tests.adapters.keras import digits_model
from tests.adapters.keras.digits_model import my_part
from tests.support.errors import raises

keras = tf.keras
EPOCHS = 3
make, fit = partial(digits_model.make, keras), partial(digits_model.fit, hvd)
KINDS = (keras.optimizers.SGD, keras.optimizers.legacy.SGD)


def work() -> Dict[str, List[float]]:
    """Return what a run on any number of ranks must come to; on three ranks also check what they share."""
    hvd.init()
    assert keras.Model.__module__.startswith("tf_keras."), keras.Model.__module__
    images, labels = my_part()
    results = {}
    for name, optimizer in (
        ("adam", keras.optimizers.Adam(0.01)),
        ("clipped", keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.3)),
        ("legacy", keras.optimizers.legacy.SGD(0.1, momentum=0.9)),
        ("accumulated", keras.optimizers.Adam(0.01)),
    ):
        passes = 2 if name == "accumulated" else 1
        model = make(hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes))
        history = fit(model, images, labels, epochs=EPOCHS)
        results[name] = history["loss"]
        if name == "adam":
            results["accuracy"] = history["accuracy"]
            if hvd.size() > 1:
                saved_and_loaded(model, images, labels)
    if hvd.size() > 1:
        for check in (
            accumulation, accumulated_rows, gradients_that_are_asked_for, parts_of_one_rank,
            sync_batch_normalization,
        ):  # fmt: skip
            check()
    hvd.shutdown()
    return results


def saved_and_loaded(model: Any, images: Any, labels: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "model.keras")
        model.save(path)
        plain, loaded = keras.models.load_model(path), hvd.load_model(path)
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(path)
        assert hvd.load_model(path).optimizer is None
    assert not hasattr(plain.optimizer, "_reducer")
    assert type(loaded.optimizer).__bases__ == type(model.optimizer).__bases__
    again, further = fit(loaded, images, labels), fit(model, images, labels)
    np.testing.assert_allclose(again["loss"], further["loss"], rtol=1e-5)


def accumulation() -> None:
    """Steps are made of sums or averages over several batches, of other gradients on each rank."""
    mean_rank = sum(range(hvd.size())) / hvd.size()
    for kind, average, wrap in ((KINDS[0], False, tf.function), (KINDS[1], True, lambda function: function)):
        optimizer = hvd.DistributedOptimizer(
            kind(1.0), backward_passes_per_step=3, average_aggregated_gradients=average
        )
        own, common, unused = tf.Variable([0.0, 0.0]), tf.Variable(0.0), tf.Variable(5.0)
        optimizer.register_local_var(own)
        batch = tf.Variable(0.0)

        @wrap
        def step(optimizer=optimizer, own=own, common=common, unused=unused, batch=batch):
            gradient = batch + float(hvd.rank())
            optimizer.apply_gradients([(tf.fill([2], gradient), own), (gradient, common), (None, unused)])

        for number in range(7):
            batch.assign(float(number))
            step()
            done = number // 3 * 3 + (3 if number % 3 == 2 else 0)
            total, factor = sum(range(done)), 1 / 3 if average else 1.0
            np.testing.assert_allclose(common.numpy(), -(total + done * mean_rank) * factor, rtol=1e-5)
            mine = -(total + done * hvd.rank()) * factor / hvd.size()
            np.testing.assert_allclose(own.numpy(), [mine, mine], rtol=1e-5, atol=1e-6)
            assert int(optimizer.iterations) == number + 1 and float(unused) == 5.0
            assert int(optimizer._agg_helper.counter) == (number + 1) % 3


def accumulated_rows() -> None:
    table = tf.Variable(tf.zeros([3, 1]))
    rows = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([hvd.rank() % 3]), tf.constant([3, 1]))
    dense, sparse = (
        hvd.DistributedOptimizer(KINDS[0](1.0), backward_passes_per_step=2, sparse_as_dense=as_dense)
        for as_dense in (True, False)
    )
    for _ in range(2):
        dense.apply_gradients([(rows, table)])
    times = [sum(rank % 3 == row for rank in range(hvd.size())) for row in range(3)]
    np.testing.assert_allclose(table.numpy()[:, 0], [-2 * count / hvd.size() for count in times], rtol=1e-6)
    raises(ConfigError, lambda: sparse.apply_gradients([(rows, table)]), "sparse_as_dense=True")


def gradients_that_are_asked_for() -> None:
    """They are reduced, and not reduced again when they are applied, which a sum would show."""
    wanted = sum(range(1, hvd.size() + 1))
    for kind in KINDS:
        optimizer, variable = hvd.DistributedOptimizer(kind(1.0), op=hvd.Sum), tf.Variable(1.0)

        def loss(variable: Any = variable) -> Any:
            return variable * (hvd.rank() + 1.0)

        ((gradient, _),) = optimizer._compute_gradients(loss, [variable])
        np.testing.assert_allclose(gradient.numpy(), wanted)
        optimizer.apply_gradients([(gradient, variable)])
        optimizer.minimize(loss, [variable])
        optimizer.apply_gradients([(tf.constant(hvd.rank() + 1.0), variable)])
        np.testing.assert_allclose(variable.numpy(), 1.0 - 3 * wanted)
        ((gradient, _),) = optimizer.compute_gradients(loss, [variable])
        np.testing.assert_allclose(gradient.numpy(), wanted)
        accumulating = hvd.DistributedOptimizer(kind(1.0), backward_passes_per_step=2)
        ((gradient, _),) = accumulating.compute_gradients(loss, [variable])
        np.testing.assert_allclose(gradient.numpy(), hvd.rank() + 1.0, err_msg="the sums are reduced, later")


def parts_of_one_rank() -> None:
    """Layers that are a rank's own keep its gradients, divided by the number of ranks."""
    layers = [keras.layers.Dense(2), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.set_weights([np.full_like(item, 0.5) for item in model.get_weights()])
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(model(tf.ones([1, 3]) * (hvd.rank() + 1.0)))
    plain = tape.gradient(loss, model.trainable_weights)
    optimizer = hvd.PartialDistributedOptimizer(KINDS[0](1.0), local_layers=layers[0])
    apart = hvd_tf.PartialDistributedGradientTape(tape, local_layers=layers[:1])
    local, shared = apart.get_local_and_global_gradients(loss, model.trainable_weights)
    assert [id(item) for item, _ in local] == [id(item) for item in layers[0].trainable_weights]
    pairs = optimizer._compute_gradients(loss, model.trainable_weights, tape=tape)
    for gradients in ([gradient for gradient, _ in pairs], [item for _, item in [*local, *shared]]):
        for gradient, own in zip(gradients[:2], plain[:2]):
            np.testing.assert_allclose(gradient.numpy(), own.numpy() / hvd.size(), rtol=1e-6)
        for gradient, own in zip(gradients[2:], plain[2:]):
            np.testing.assert_allclose(gradient.numpy(), hvd_tf.allreduce(own).numpy(), rtol=1e-6)
    raises(ValueError, lambda: hvd_tf.PartialDistributedGradientTape(tape, local_layers=[layers[0], 5]))


def sync_batch_normalization() -> None:
    """Mean and variance are those of all ranks' batches together, for images and for rows."""
    draw = np.random.default_rng(7)
    for shape, options in (((4, 3, 3, 2), {}), ((4, 2, 6), {"axis": 1})):
        whole = draw.normal(size=(shape[0] * hvd.size(), *shape[1:])).astype(np.float32)
        mine = slice(hvd.rank() * shape[0], (hvd.rank() + 1) * shape[0])
        alone = keras.layers.BatchNormalization(fused=False, **options)
        together = hvd_tf.SyncBatchNormalization(**options)
        wanted, found = alone(whole, training=True)[mine], together(whole[mine], training=True)
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-5)
        for name in ("moving_mean", "moving_variance"):
            kept, kept_alone = getattr(together, name).numpy(), getattr(alone, name).numpy()
            np.testing.assert_allclose(kept, kept_alone, rtol=1e-4, atol=1e-6)
