"""Callbacks in one process, called as Keras calls them: learning rates, momentum, broadcasts, checks."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from ringcomm.errors import BrokenInvariantError, ConfigError

# Keras' own variables are converted so: see keras.ops.convert_to_numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def model_of(optimizer: Any, **options: Any) -> Any:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse", **options)
    return model


def attached(callback: Any, model: Any, steps: Any = 4) -> Any:
    callback.set_model(model)
    callback.set_params({"steps": steps})
    callback.on_train_begin()
    return callback


def test_the_momentum_is_corrected_for_the_batch_in_which_the_rate_changes(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    optimizer = keras.optimizers.SGD(0.25, momentum=0.5)
    model = model_of(optimizer, run_eagerly=True)
    callback = hvd.callbacks.LearningRateScheduleCallback(0.25, lambda epoch: 2.0**epoch)
    attached(callback, model)
    seen = []
    for epoch in range(3):
        callback.on_epoch_begin(epoch)
        for batch in range(2):
            callback.on_train_batch_begin(batch)
            seen.append((float(optimizer.learning_rate), optimizer.momentum))
            callback.on_train_batch_end(batch)
            assert optimizer.momentum == 0.5
        logs = {}
        callback.on_epoch_end(epoch, logs)
        assert logs == {"lr": 0.25 * 2**epoch}
        callback.on_epoch_end(epoch)
    assert seen == [(0.25, 0.5), (0.25, 0.5), (0.5, 1.0), (0.5, 0.5), (1.0, 1.0), (1.0, 0.5)]


def test_the_momentum_is_left_where_keras_has_compiled_it_in_or_it_is_not_to_be_corrected(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    for eager, correct, momentum in ((False, True, 0.5), (True, False, 0.5), (True, True, 0.0)):
        optimizer = keras.optimizers.SGD(0.25, momentum=momentum)
        callback = hvd.callbacks.LearningRateScheduleCallback(0.25, 2.0, momentum_correction=correct)
        attached(callback, model_of(optimizer, run_eagerly=eager))
        callback.on_epoch_begin(0)
        callback.on_train_batch_begin(0)
        assert (float(optimizer.learning_rate), optimizer.momentum) == (0.5, momentum)


def test_a_schedule_applies_between_its_epochs(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    optimizer = keras.optimizers.SGD(0.125)
    callback = hvd.callbacks.LearningRateScheduleCallback(1.0, 0.5, start_epoch=1, end_epoch=2)
    attached(callback, model_of(optimizer))
    rates = []
    for epoch in range(3):
        optimizer.learning_rate = 0.125
        callback.on_epoch_begin(epoch)
        callback.on_train_batch_begin(0)
        rates.append(float(optimizer.learning_rate))
    assert rates == [0.125, 0.5, 0.125]


def test_the_end_of_the_warm_up_is_logged(alone: Any, caplog: pytest.LogCaptureFixture) -> None:
    import keras

    import ringcomm.keras as hvd

    optimizer = keras.optimizers.SGD(0.125)
    callback = hvd.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2, verbose=1)
    attached(callback, model_of(optimizer))
    with caplog.at_level(logging.INFO, "ringcomm.keras.callbacks"):
        for epoch in range(3):
            callback.on_epoch_begin(epoch)
            for batch in range(2):
                optimizer.learning_rate = 0.125
                callback.on_train_batch_begin(batch)
                # One rank has nothing to warm up to; after the end the rate is set once.
                assert float(optimizer.learning_rate) == (0.125 if (epoch, batch) == (2, 1) else 0.5)
    (record,) = caplog.records
    assert record.getMessage() == "Warm-up is over: the learning rate is 0.5."


def test_the_number_of_batches_is_needed_for_rates_within_epochs(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    model = model_of(keras.optimizers.SGD(0.1))
    callback = attached(hvd.callbacks.LearningRateWarmupCallback(0.5), model, steps=None)
    with pytest.raises(ConfigError, match="steps_per_epoch is required"):
        callback.on_train_batch_begin(0)
    given = hvd.callbacks.LearningRateWarmupCallback(0.5, steps_per_epoch=3)
    assert attached(given, model, steps=7).schedule.steps_per_epoch == 3
    with pytest.raises(ConfigError, match="initial_lr is required"):
        hvd.callbacks.LearningRateScheduleCallback(None, 1.0)


def test_a_model_that_is_not_built_is_broadcast_after_its_first_batch(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    model = keras.Sequential([keras.layers.Dense(1), keras.layers.BatchNormalization()])
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    callback = attached(hvd.callbacks.BroadcastGlobalVariablesCallback(0), model)
    assert not callback.broadcast_done and not hvd_context().batch_norm
    model.build((None, 3))
    callback.on_train_batch_end(0)
    assert callback.broadcast_done
    assert model.optimizer.built, "its state was broadcast too"
    assert hvd_context().batch_norm, "balanced data warn of few samples then"
    model.optimizer = None
    callback.on_train_batch_end(1)
    callback.on_train_begin()
    only_weights = attached(hvd.callbacks.BroadcastGlobalVariablesCallback(0), model)
    assert only_weights.broadcast_done


def hvd_context() -> Any:
    from ringcomm import api

    return api.context()


def test_training_without_a_reduction_is_found_after_the_epoch(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    callback = attached(hvd.callbacks.BroadcastGlobalVariablesCallback(0), model_of(optimizer))
    with pytest.raises(BrokenInvariantError, match="has trained with SGD without reducing gradients"):
        callback.on_epoch_end(0)
    callback.model.fit(np.ones((2, 3)), np.ones(2), verbose=0, callbacks=[callback])
    callback.on_epoch_end(0)
    callback.set_model(model_of(keras.optimizers.SGD(0.1)))
    callback.on_epoch_end(0)


def test_metrics_of_one_rank_are_its_own(alone: Any) -> None:
    import keras

    import ringcomm.keras as hvd

    plain = attached(hvd.callbacks.MetricAverageCallback(), model_of(keras.optimizers.SGD(0.1)))
    logs = {"loss": np.float32(0.5), "note": "text"}
    plain.on_epoch_end(0, logs)
    assert logs == {"loss": 0.5, "note": "text"}
    plain.on_epoch_end(0)
    empty = {}
    plain.on_epoch_end(0, empty)
    assert empty == {}
    counted = attached(hvd.callbacks.MetricAverageCallback(log_stats=True), plain.model)
    counted.on_epoch_end(0, empty)
    assert "ringcomm/elapsed_s" in empty


def test_callbacks_are_those_of_keras_2_too() -> None:
    import ringcomm.keras as hvd

    callback = hvd.callbacks.MetricAverageCallback()
    assert callback._implements_train_batch_hooks()
    assert not callback._implements_test_batch_hooks() and not callback._implements_predict_batch_hooks()
    assert not callback._supports_tf_logs and callback._chief_worker_only is None
