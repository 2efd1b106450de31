"""Optimizers, tapes, layers and data in one process: their arguments, and what is reduced with one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringcomm.errors import ConfigError


def test_arguments_of_optimizers_are_checked(alone: Any) -> None:
    import tensorflow as tf

    import ringcomm.tensorflow as hvd

    own = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    with pytest.raises(ConfigError, match="backward_passes_per_step must be > 0, not"):
        hvd.DistributedOptimizer(own, backward_passes_per_step=0)
    with pytest.raises(ConfigError, match="requires a Keras optimizer, not <class 'str'>"):
        hvd.DistributedOptimizer("adam")
    with pytest.raises(ConfigError, match="positive integer"):
        hvd.DistributedOptimizer(own, groups=-1)


def test_optimizers_keep_the_name_of_their_own_and_share_a_class(alone: Any) -> None:
    import tensorflow as tf

    import ringcomm.tensorflow as hvd

    own = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    plain, named = hvd.DistributedOptimizer(own), hvd.DistributedOptimizer(own, name="mine")
    assert (plain.get_name(), named.get_name()) == ("GradientDescent", "mine")
    assert type(plain) is type(named) and isinstance(plain, type(own))
    assert own.get_name() == "GradientDescent"


def test_factors_apply_to_every_kind_of_gradient_of_one_rank(alone: Any) -> None:
    import tensorflow as tf

    from ringcomm._tensorflow.gradients import GradientReducer
    from ringcomm.ops import ReduceOp

    reducer = GradientReducer()
    variables = [tf.Variable(tf.zeros([3, 2])) for _ in range(3)]
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([2]), tf.constant([3, 2]))
    given = [tf.ones([3, 2]), slices, None]
    assert all(mine is own for mine, own in zip(reducer.reduce(given, variables), given))
    reducer.how = reducer.how._replace(op=ReduceOp.SUM, prescale=3.0, postscale=0.5)
    dense, sparse, absent = reducer.reduce(given, variables)
    assert absent is None
    assert dense.numpy().tolist() == [[1.5, 1.5]] * 3
    assert sparse.values.numpy().tolist() == [[1.5, 1.5]] and sparse.indices is slices.indices


def test_a_fresh_reducer_has_no_local_variables(alone: Any) -> None:
    import tensorflow as tf

    from ringcomm._adapter.reduction import Reduction
    from ringcomm._tensorflow.gradients import GradientReducer

    variable, reducer = tf.Variable(1.0), GradientReducer(Reduction(sparse_as_dense=True))
    reducer.register_local(variable)
    other = reducer.fresh()
    assert reducer.is_local(variable) and not other.is_local(variable)
    assert other.how is reducer.how


def test_weighted_gradients_of_one_rank_are_its_own(alone: Any) -> None:
    """They are reduced although there is one rank, because reductions count the steps."""
    for compiled in (False, True):
        compare_weighted_gradients(compiled)


def compare_weighted_gradients(compiled: bool) -> None:
    import tensorflow as tf

    import ringcomm.tensorflow as hvd

    data = hvd.BalancedDataset(np.arange(8.0), np.arange(8.0) * 2, global_batch=4)
    table, weight = tf.Variable(tf.ones([8, 1], tf.float64)), tf.Variable(np.float64(1.0))

    def gradients(x: Any, y: Any) -> Any:
        def recorded() -> Any:
            with tf.GradientTape() as tape:
                rows = tf.gather(table, tf.cast(x, tf.int64))[:, 0]
                loss = tf.reduce_mean(tf.square(rows * weight - y))
            return tape, loss

        (plain, loss), (tape, same) = recorded(), recorded()
        found = hvd.DistributedGradientTape(tape, batches=data).gradient(same, [table, weight])
        return [tf.convert_to_tensor(item) for item in [*found, *plain.gradient(loss, [table, weight])]]

    computed = tf.function(gradients, autograph=False) if compiled else gradients
    for x, y in data:
        of_table, of_weight, table_alone, weight_alone = computed(x, y)
        np.testing.assert_array_equal(of_table.numpy(), table_alone.numpy())
        np.testing.assert_array_equal(of_weight.numpy(), weight_alone.numpy())
    assert data.state_dict()["epoch"] == 1, "both steps were counted"


def test_data_of_one_array_are_its_rows(alone: Any) -> None:
    import ringcomm.tensorflow as hvd

    data = hvd.BalancedDataset(np.arange(10.0), global_batch=4, shuffle=False)
    assert [rows.numpy().tolist() for rows in data] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(ConfigError, match=r"equally many rows, not \[2, 3\]"):
        hvd.BalancedDataset(np.ones(3), np.ones(2))


def test_batch_normalization_of_one_rank_is_that_of_keras(alone: Any) -> None:
    import tensorflow as tf

    import ringcomm.tensorflow as hvd

    for fused in (True, None):
        with pytest.raises(ValueError, match="does not support fused=True"):
            hvd.SyncBatchNormalization(fused=fused)
    batch = tf.constant(np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32))
    ours, theirs = hvd.SyncBatchNormalization(), tf.keras.layers.BatchNormalization()
    np.testing.assert_array_equal(ours(batch, training=True), theirs(batch, training=True))
