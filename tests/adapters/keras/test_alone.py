"""ringcomm.keras in one process: optimizers and their arguments, data, saved models, callbacks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

from ringcomm.errors import BrokenInvariantError, ConfigError

# Keras' own variables are converted so: see keras.ops.convert_to_numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

keras: Any = None
tf: Any = None
hvd: Any = None
hvd_of_tensorflow: Any = None


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Import what the tests use: to collect them must not import a framework."""
    globals().update(keras=import_module("keras"), tf=import_module("tensorflow"))
    globals().update(hvd=import_module("ringcomm.keras"))
    globals().update(hvd_of_tensorflow=import_module("ringcomm.tensorflow.keras"))


def test_arguments_of_optimizers_are_checked(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringcomm.keras import optimizer

    sgd = keras.optimizers.SGD(0.1)
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    data = hvd.BalancedDataset(np.arange(4), global_batch=4)
    for thing, options, words in (
        (sgd, {"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        (5, {}, "requires a Keras optimizer, not <class 'int'>"),
        (accumulating, {"backward_passes_per_step": 2}, "mean the same: pass only one"),
        (sgd, {"batches": data, "op": hvd.Sum}, "use it with op=Average"),
    ):
        with pytest.raises(ConfigError, match=words):
            hvd.DistributedOptimizer(thing, **options)
    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    with pytest.raises(NotImplementedError, match="The backend of Keras is openvino"):
        optimizer.reducer_class()


def test_losses_are_scaled_outside_of_the_reduction_only(alone: Any) -> None:
    """A step is skipped by what all ranks have reduced, not by a rank's own gradients."""
    scales = keras.optimizers.LossScaleOptimizer
    keras.config.set_dtype_policy("mixed_float16")
    try:
        made = [
            hvd.DistributedOptimizer(own) for own in (keras.optimizers.SGD(), scales(keras.optimizers.SGD()))
        ]
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    finally:
        keras.config.set_dtype_policy("float32")
    for scaled in made:
        assert isinstance(scaled, scales) and type(scaled.inner_optimizer) is keras.optimizers.SGD
    data, begin = np.ones((2, 1), "float32"), hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    for given in (scales(plain), plain):  # Model.compile() scales the latter because of the model's policy
        model.compile(given, "mse")
        with pytest.raises(ConfigError, match="the other way round: hvd.DistributedOptimizer.keras"):
            model.fit(data, data, verbose=0, callbacks=[begin])


def test_variables_without_a_gradient_are_left_out_of_the_reduction(alone: Any) -> None:
    data = hvd.BalancedDataset(np.arange(4), global_batch=2)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), batches=data)
    variables = [keras.Variable(0.0), keras.Variable(5.0)]
    optimizer.build(variables)
    data.on_epoch_begin()
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        optimizer.apply([keras.ops.convert_to_tensor(2.0), None], variables)
    assert [float(item) for item in variables] == [-2.0, 5.0]
    assert data.pace.step == 1


def test_optimizers_of_keras_2_are_taken_too(alone: Any) -> None:
    tf_keras = pytest.importorskip("tf_keras")
    for passes, average, expected in ((1, False, -4.0), (2, False, -4.0), (2, True, -2.0)):
        variable = tf.Variable(0.0)
        options = {"backward_passes_per_step": passes, "average_aggregated_gradients": average}
        optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0), **options)
        for gradient in (1.0, 3.0):
            optimizer.apply_gradients([(tf.constant(gradient), variable)])
        assert float(variable) == expected


# ---- balanced data ---------------------------------------------------------------------------


def test_data_need_equally_many_rows_and_a_newer_keras(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"equally many rows, not \[2, 3\]"):
        hvd.BalancedDataset([np.ones(3), np.ones(2)])
    monkeypatch.delattr(keras.utils.PyDataset, "on_epoch_begin")
    with pytest.raises(ConfigError, match=f"needs a newer Keras than {keras.__version__}"):
        hvd.BalancedDataset(np.ones(3))


def test_keras_may_look_at_a_batch_before_it_trains(alone: Any) -> None:
    """Two rows for their types: no step is taken, and the end of such an epoch is none."""
    data = hvd.BalancedDataset(np.arange(10), np.arange(10) * 2, global_batch=4, shuffle=False)
    x, y = data[1]
    assert x.tolist() == [4, 5] and y.tolist() == [8, 10]
    data.on_epoch_end()
    assert len(data) == 3 and data.state_dict()["epoch"] == data.state_dict()["step"] == 0
    data.on_epoch_begin()
    with pytest.raises(ConfigError, match=r"use DistributedOptimizer\(..., batches=data\)"):
        data[0]
    data.on_epoch_end()
    assert data.state_dict()["epoch"] == 0
    data.pace.ended = True  # ``ringrun --advise``: threads of the framework must not raise SystemExit
    with pytest.raises(SystemExit):
        data.on_epoch_end()


# ---- saved models ----------------------------------------------------------------------------


def test_loaded_models_have_distributed_optimizers(alone: Any, tmp_path: Path) -> None:
    class Own(keras.optimizers.SGD):
        """A class of the user's."""

    class Doubles(keras.layers.Layer):
        """A layer of the user's."""

        def call(self, inputs: Any) -> Any:
            return inputs * 2

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    for own in (keras.optimizers.Adam(0.25), Own(0.25)):
        model.compile(hvd.DistributedOptimizer(own), loss="mse")
        model.optimizer.build(model.trainable_variables)
        model.save(tmp_path / "model.keras")
        for load in (hvd.load_model, hvd_of_tensorflow.load_model):
            loaded = load(tmp_path / "model.keras", [Own], compression=hvd.Compression.fp16)
            assert isinstance(loaded.optimizer, type(own)), type(loaded.optimizer).__mro__
            assert loaded.optimizer._ringcomm_reducer.how.compression is hvd.Compression.fp16
            assert float(loaded.optimizer.learning_rate) == 0.25
    keras.Sequential([keras.Input((3,)), Doubles()]).save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", custom_objects={"Doubles": Doubles})
    assert getattr(loaded, "optimizer", None) is None


# ---- callbacks, called as Keras calls them ---------------------------------------------------


def attached(callback: Any, optimizer: Any, steps: Any = 4, **options: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse", **options)
    callback.set_model(model)
    callback.set_params({"steps": steps})
    callback.on_train_begin()
    return callback


def test_the_momentum_is_corrected_for_the_batch_in_which_the_rate_changes(alone: Any) -> None:
    optimizer = keras.optimizers.SGD(0.25, momentum=0.5)
    callback = hvd.callbacks.LearningRateScheduleCallback(0.25, lambda epoch: 2.0**epoch)
    attached(callback, optimizer, run_eagerly=True)
    seen = []
    for epoch in range(3):
        callback.on_epoch_begin(epoch)
        for batch in range(2):
            callback.on_train_batch_begin(batch)
            seen.append((float(optimizer.learning_rate), optimizer.momentum))
            callback.on_train_batch_end(batch)
            assert optimizer.momentum == 0.5
        logs: Dict[str, float] = {}
        callback.on_epoch_end(epoch, logs)
        assert logs == {"lr": 0.25 * 2**epoch}
    assert seen == [(0.25, 0.5), (0.25, 0.5), (0.5, 1.0), (0.5, 0.5), (1.0, 1.0), (1.0, 0.5)]
    for eager, correct, momentum in ((False, True, 0.5), (True, False, 0.5), (True, True, 0.0)):
        optimizer = keras.optimizers.SGD(0.25, momentum=momentum)
        callback = hvd.callbacks.LearningRateScheduleCallback(0.25, 2.0, momentum_correction=correct)
        attached(callback, optimizer, run_eagerly=eager).on_epoch_begin(0)
        callback.on_train_batch_begin(0)
        assert (float(optimizer.learning_rate), optimizer.momentum) == (0.5, momentum)


def test_a_model_that_is_not_built_is_broadcast_after_its_first_batch(alone: Any) -> None:
    from ringcomm import api

    model = keras.Sequential([keras.layers.Dense(1), keras.layers.BatchNormalization()])
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    assert not callback.broadcast_done and not api.context().batch_norm
    model.build((None, 3))
    callback.on_train_batch_end(0)
    assert callback.broadcast_done
    assert model.optimizer.built, "its state was broadcast too"
    assert api.context().batch_norm, "balanced data warn of few samples then"


def test_training_without_a_reduction_is_found_after_the_epoch(alone: Any) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    callback = attached(hvd.callbacks.BroadcastGlobalVariablesCallback(0), optimizer)
    with pytest.raises(BrokenInvariantError, match="has trained with SGD without reducing gradients"):
        callback.on_epoch_end(0)
    callback.model.fit(np.ones((2, 3)), np.ones(2), verbose=0, callbacks=[callback])
    callback.on_epoch_end(0)


def test_results_of_tensorflow_keras_are_tensors(alone: Any) -> None:
    assert hvd_of_tensorflow.allreduce(tf.constant([1.0])).numpy().tolist() == [1.0]
    rows, counts = hvd_of_tensorflow.alltoall(tf.ones([2]), [2])
    assert rows.numpy().tolist() == [1.0, 1.0] and counts.numpy().tolist() == [2]


def test_callbacks_of_the_module_are_under_both_of_horovods_names() -> None:
    for one, other in (
        (hvd.callbacks, hvd_of_tensorflow.callbacks),
        (hvd.elastic, hvd_of_tensorflow.elastic),
    ):
        names: List[str] = [
            name for name in vars(one) if isinstance(vars(one)[name], type) and name[0] != "_"
        ]
        assert names and all(getattr(other, name) is getattr(one, name) for name in names)
