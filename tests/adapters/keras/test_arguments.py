"""Optimizers, data and models of Keras in one process: arguments, errors, and what one rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringcomm.errors import ConfigError

# Keras' own variables are converted so: see keras.ops.convert_to_numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def test_arguments_of_optimizers_are_checked(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    sgd = keras.optimizers.SGD(0.1)
    with pytest.raises(ConfigError, match="backward_passes_per_step must be > 0, not"):
        hvd.DistributedOptimizer(sgd, backward_passes_per_step=0)
    with pytest.raises(ConfigError, match="requires a Keras optimizer, not <class 'int'>"):
        hvd.DistributedOptimizer(5)
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="mean the same: pass only one"):
        hvd.DistributedOptimizer(accumulating, backward_passes_per_step=2)
    data = hvd.BalancedDataset(np.arange(4), global_batch=4)
    with pytest.raises(ConfigError, match="use it with op=Average and backward_passes_per_step=1"):
        hvd.DistributedOptimizer(sgd, batches=data, op=hvd.Sum)


def test_one_rank_adds_up_its_passes(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    for average, expected in ((False, -4.0), (True, -2.0)):
        variable = keras.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        optimizer.build([variable])
        for gradient in (1.0, 3.0):
            assert float(variable) == 0.0
            optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        assert float(variable) == expected


def test_classes_of_optimizers_are_named_like_their_own(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd
    from ringcomm.keras.optimizer import distributed_class

    class Own(keras.optimizers.SGD):
        """A class of the user's."""

    kept = distributed_class(Own)
    assert (kept.__name__, kept.__module__) == ("Own", __name__) and issubclass(kept, Own)
    assert distributed_class(Own) is kept and distributed_class(kept) is kept
    public = distributed_class(keras.optimizers.Adam)
    assert (public.__name__, public.__module__) == ("Adam", "keras.optimizers")
    twice = hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
    assert sum(kind.__name__ == "_Distributed" for kind in type(twice).__mro__) == 1
    assert float(twice.learning_rate) == 0.5


def test_local_layers_are_those_of_the_argument(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    layers = [keras.layers.Dense(1), keras.layers.Dense(1, use_bias=False)]
    for layer in layers:
        layer.build((None, 2))
    for local, count in ((None, 0), (layers[0], 2), (layers, 3), (set(layers[1:]), 1)):
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=local)
        assert len(optimizer._ringcomm_reducer._local) == count


def test_half_precision_scales_losses_outside_of_the_reduction(alone: Any) -> None:
    """A step is skipped by what all ranks have reduced, not by a rank's own gradients."""
    import keras

    import ringcomm.keras as hvd

    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
        again = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)))
    finally:
        keras.config.set_dtype_policy("float32")
    for scaled in (optimizer, again):
        assert isinstance(scaled, keras.optimizers.LossScaleOptimizer)
        assert type(scaled.inner_optimizer) is keras.optimizers.SGD


def test_losses_are_not_scaled_inside_of_the_reduction(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    finally:
        keras.config.set_dtype_policy("float32")
    data = np.ones((2, 1), "float32")
    optimizer = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
    for given in (optimizer, hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))):
        model.compile(given, "mse")
        with pytest.raises(ConfigError, match="the other way round: hvd.DistributedOptimizer.keras"):
            model.fit(data, data, verbose=0)


def test_the_state_of_an_optimizer_is_loaded(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    variable, state = keras.Variable(0.0), {}
    first, second = (hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)) for _ in range(2))
    for optimizer in (first, second):
        optimizer.build([variable])
    first.apply([keras.ops.convert_to_tensor(1.0)], [variable])
    first.save_own_variables(state)
    second.load_own_variables(state)
    assert int(second.iterations) == 1
    second.apply([keras.ops.convert_to_tensor(0.0)], [variable])
    assert float(variable) == -1.5, "the momentum of the first step"


def test_variables_without_a_gradient_are_left_out_of_the_reduction(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

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
    import tensorflow as tf

    import ringcomm.keras as hvd

    tf_keras = pytest.importorskip("tf_keras")
    for passes, average, expected in ((1, False, -4.0), (2, False, -4.0), (2, True, -2.0)):
        variable = tf.Variable(0.0)
        own = tf_keras.optimizers.SGD(1.0)
        optimizer = hvd.DistributedOptimizer(
            own, backward_passes_per_step=passes, average_aggregated_gradients=average
        )
        assert isinstance(optimizer, tf_keras.optimizers.SGD)
        for gradient in (1.0, 3.0):
            optimizer.apply_gradients([(tf.constant(gradient), variable)])
        assert float(variable) == expected


def test_a_backend_without_an_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    from ringcomm.keras import backends

    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    with pytest.raises(NotImplementedError, match="The backend of Keras is openvino; gradients can be red"):
        backends.reducer_class()
    backends.wait_for_reductions()


# ---- balanced data ---------------------------------------------------------------------------


def test_data_need_equally_many_rows_and_a_newer_keras(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    import ringcomm.keras as hvd

    with pytest.raises(ConfigError, match=r"equally many rows, not \[2, 3\]"):
        hvd.BalancedDataset([np.ones(3), np.ones(2)])
    monkeypatch.delattr(keras.utils.PyDataset, "on_epoch_begin")
    with pytest.raises(ConfigError, match=f"needs a newer Keras than {keras.__version__}"):
        hvd.BalancedDataset(np.ones(3))


def test_keras_may_look_at_a_batch_before_it_trains(alone: Any) -> None:
    """Two rows for their types: no step is taken, and the end of such an epoch is none."""
    import ringcomm.keras as hvd

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


def test_an_epoch_of_one_rank_is_all_of_the_data(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    inputs = np.random.default_rng(1).normal(size=(10, 3)).astype("float32")
    data = hvd.BalancedDataset(inputs, inputs.sum(1), global_batch=4)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), batches=data), loss="mse")
    metrics = hvd.callbacks.MetricAverageCallback()
    model.fit(data, epochs=2, verbose=0, callbacks=[metrics])
    assert data.state_dict()["epoch"] == 2
    from ringcomm.keras.optimizer import samples_of

    assert samples_of(model) == 10
    model.compile("sgd")
    assert samples_of(model) is None


def test_a_program_that_machines_were_recommended_to_ends_with_the_epoch(alone: Any) -> None:
    """``ringrun --advise``: threads of the framework must not raise SystemExit."""
    import ringcomm.keras as hvd

    data = hvd.BalancedDataset(np.arange(4), global_batch=4)
    data.pace.ended = True
    with pytest.raises(SystemExit) as raised:
        data.on_epoch_end()
    assert raised.value.code == 0


# ---- saved models ----------------------------------------------------------------------------


def test_loaded_models_have_distributed_optimizers(alone: Any, tmp_path: Path) -> None:
    import keras

    import ringcomm.keras as hvd
    import ringcomm.tensorflow.keras as hvd_of_tensorflow

    class Own(keras.optimizers.SGD):
        """A class of the user's."""

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


def test_a_model_without_an_optimizer_is_loaded_as_it_is(alone: Any, tmp_path: Path) -> None:
    import keras

    import ringcomm.keras as hvd

    class Doubles(keras.layers.Layer):
        """A layer of the user's."""

        def call(self, inputs: Any) -> Any:
            return inputs * 2

    model = keras.Sequential([keras.Input((3,)), Doubles()])
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", custom_objects={"Doubles": Doubles})
    assert getattr(loaded, "optimizer", None) is None
    assert loaded(np.ones((1, 3))).numpy().tolist() == [[2.0] * 3]
