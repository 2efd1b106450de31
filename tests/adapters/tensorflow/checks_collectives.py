"""What every rank checks about collectives of TensorFlow: results, gradients and errors, in each mode."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd
from ringcomm.errors import HorovodInternalError, Misuse
from tests.adapters import contract
from tests.adapters.jobs import close, numbers, operations_with_a_set
from tests.adapters.tensorflow.modes import MODES, in_a_graph, session_of_a_graph
from tests.support.errors import raises

tf1 = tf.compat.v1

TYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"]
REFUSED = (tf.errors.OpError, ValueError)


def check_results_in_every_mode() -> None:
    for mode in MODES:
        contract.check_collectives(hvd, mode, TYPES, refused=REFUSED)


def check_every_form_with_every_option() -> None:
    # broadcast_() is of variables.
    contract.check_every_form(hvd, "ringcomm.tensorflow", tf.constant, np.asarray, less=["broadcast_"])


def check_mismatches_in_every_mode() -> None:
    for mode in MODES:
        contract.check_a_mismatch(hvd, mode, tf.errors.FailedPreconditionError, "Mismatched")
    if hvd.size() > 1:
        error = raises(tf.errors.OpError, lambda: hvd.allreduce(tf.zeros(2 + hvd.rank() % 2), name="eager"))
        assert isinstance(error, HorovodInternalError) and isinstance(error, Misuse), type(error)


def check_gradients_of_every_operation() -> None:
    """Against what Horovod defines, which is not always the derivative: losses are averaged over ranks."""
    size, rank = hvd.size(), hvd.rank()
    mine = numbers(rank, (size, 2), np.float32, 7)
    weights = [numbers(other, (size, 2), np.float32, 8) for other in range(size)]
    wide = numbers(0, (size * size, 2), np.float32, 9)
    mean = np.mean(weights, axis=0)
    weights_of_all = np.concatenate(weights)

    def function(tensor: Any) -> Any:
        own, all_rows = weights[rank], wide + rank
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(tensor)
            losses = [
                hvd.allreduce(tensor, op=hvd.Sum, name="named") * own,
                hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0) * own,
                hvd.allgather(tensor) * all_rows,
                hvd.broadcast(tensor, size - 1) * own,
                hvd.reducescatter(tensor, op=hvd.Sum) * own[:1],
                hvd.alltoall(tensor) * own,
                hvd.grouped_allreduce([tensor, tensor])[1] * own,
                hvd.grouped_allgather([tensor, 3 * tensor])[1] * all_rows,
                hvd.grouped_reducescatter([tensor, 3 * tensor], op=hvd.Average)[1] * own[:1],
                hvd.alltoall(tensor, splits=[0] * (size - 1) + [size])[0]
                * (weights_of_all if rank == size - 1 else weights_of_all[:0]),
            ]
        return [tape.gradient(loss, tensor) for loss in losses]

    first_rows = np.concatenate([weight[:1] for weight in weights])
    all_rows = np.mean([wide + other for other in range(size)], axis=0)[rank * size : (rank + 1) * size]
    expected = [
        mean * size, mean * size * 6, all_rows, mean if rank == size - 1 else mean * 0,
        first_rows * size, np.concatenate([weight[rank : rank + 1] for weight in weights]), mean,
        all_rows * 3, first_rows * 3, weights[rank],
    ]  # fmt: skip
    for mode in MODES:
        for found, wanted in zip(mode(function, [mine]), expected):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def check_gradients_among_the_ranks_of_a_set() -> None:
    if hvd.size() == 1:
        return
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    odd = hvd.add_process_set(list(range(1, hvd.size(), 2)))
    mine, other = (odd, even) if hvd.rank() % 2 else (even, odd)
    operations = operations_with_a_set(hvd, mine, mine.ranks[-1])

    def all_gradients(source: Any) -> Any:
        found = []
        for operation, _ in operations.values():
            with tf.GradientTape() as tape:
                tape.watch(source)
                result = operation(source, mine)
            found.append(tape.gradient(result, source, tf.ones_like(result)))
        return found

    start = np.full((2 * mine.size(), 3), float(mine.rank()), np.float32)
    for mode in MODES:
        for found, (name, (_, wanted)) in zip(mode(all_gradients, [start]), operations.items()):
            np.testing.assert_allclose(found, np.full_like(start, wanted), err_msg=f"{mode.__name__}: {name}")
    values = in_a_graph(
        lambda: [hvd.size_op(mine.process_set_id), hvd.process_set_included_op(mine.process_set_id),
                 hvd.process_set_included_op(other.process_set_id)], [],
    )  # fmt: skip
    assert values == [mine.size(), 1, 0]
    assert hvd.broadcast_object_fn(mine.ranks[-1], process_set=mine)(hvd.rank()) == mine.ranks[-1]
    hvd.barrier()
    assert hvd.remove_process_set(even) and hvd.remove_process_set(odd)


def check_weights_are_no_part_of_a_function() -> None:
    """The last rank has no weight, so its NaN do not count; gradients and uneven rows are weighted, too."""
    size, rank = hvd.size(), hvd.rank()
    weights = [3.0 + other for other in range(size - 1)] + [0.0 if size > 1 else 3.0]
    own = [numbers(other, (4, 5), np.float64, 3) for other in range(size)]
    average = np.average(own, axis=0, weights=weights)
    given = tf.constant(own[rank] if weights[rank] else np.full((4, 5), np.nan))
    splits = [1] * (size - 1) + [5 - size]
    rows = np.split(average, np.cumsum(splits)[:-1])[rank]

    def reduced(tensor: Any, weight: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(tensor)
            whole = hvd.allreduce(tensor, weight=weight, name="whole") * (1.0 + rank)
            part = hvd.reducescatter(tensor, splits=splits, weight=weight, name="part") * (1.0 + rank)
        return whole, part, tape.gradient(whole, tensor), tape.gradient(part, tensor)

    for function in (reduced, tf.function(reduced)):
        for factor in (1.0, 5.0):
            whole, part, of_whole, of_part = function(given, tf.constant(factor * weights[rank], tf.float64))
            close(whole, average * (1.0 + rank))
            close(part, rows * (1.0 + rank))
            close(of_whole, np.full((4, 5), weights[rank] / sum(weights) * size * (size + 1) / 2))
            factors = np.repeat(np.arange(1.0, size + 1), splits)[:, np.newaxis] * np.ones((4, 5))
            close(of_part, weights[rank] * size / sum(weights) * factors)


def check_indexed_slices() -> None:
    size, rank = hvd.size(), hvd.rank()
    values, indices = numbers(rank, (2, 3), np.float32, 10), np.array([rank, size], np.int64)
    expected = np.zeros((size + 1, 3))
    for other in range(size):
        np.add.at(expected, [other, size], numbers(other, (2, 3), np.float32, 10))

    def function(amounts: Any, places: Any) -> Any:
        slices = tf.IndexedSlices(amounts, places, dense_shape=tf.constant([size + 1, 3], tf.int64))
        group = hvd.grouped_allreduce([slices, amounts], op=hvd.Sum)
        average = hvd.allreduce(slices, compression=hvd.Compression.fp16)
        return [tf.convert_to_tensor(group[0]), tf.convert_to_tensor(average)]

    for mode in MODES:
        total, average = mode(function, [values, indices])
        np.testing.assert_allclose(total, expected, rtol=1e-6)
        np.testing.assert_allclose(average, expected / size, rtol=1e-3)
    slices = tf.IndexedSlices(values, indices, dense_shape=[size + 1, 3])
    for call in (
        lambda: hvd.allreduce(slices, op=hvd.Max), lambda: hvd.allreduce(slices, prescale_factor=2.0),
        lambda: hvd.allreduce(slices, weight=1.0), lambda: hvd.allgather(slices),
        lambda: hvd.broadcast(slices, 0), lambda: hvd.reducescatter(slices), lambda: hvd.alltoall(slices),
    ):  # fmt: skip
        raises(NotImplementedError, call)


def check_any_order_on_one_thread() -> None:
    """Ranks have their own orders and one thread: callbacks that wait where they submit would hang."""
    order = list(range(16))
    random.Random(hvd.rank()).shuffle(order)
    with session_of_a_graph() as session:
        place = tf1.placeholder(tf.float32, [3])
        results: dict[int, Any] = {}
        for number in order:
            kind = [hvd.allreduce, hvd.allgather, lambda item, name: hvd.broadcast(item, 0, name)][number % 3]
            results[number] = kind(place * number, name=f"any.{number}")
        for _ in range(3):
            found = session.run(results, {place: np.full(3, hvd.rank(), np.float32)})
            for number in range(0, 16, 3):
                close(found[number], np.full(3, number * (hvd.size() - 1) / 2))


def check_the_same_place_again_and_again() -> None:
    """A loop in a graph comes round to the same operation before its last round is forgotten."""

    @tf.function
    def loop(start: Any) -> Any:
        total = start
        for _ in tf.range(20):
            total = hvd.allreduce(total, op=hvd.Average, name="again") + 1.0
        return total

    close(loop(tf.constant(float(hvd.rank()))).numpy(), (hvd.size() - 1) / 2 + 20)


def check_what_a_rank_is_told_at_once() -> None:
    size = hvd.size()
    for mode in MODES:
        for splits, text in (
            ([1] * size + [0], "number of workers"),
            ([2] + [1] * (size - 1), "first dimen"),
        ):

            def exchange(mode: Any = mode, splits: Any = splits) -> Any:
                return mode(lambda item: hvd.alltoall(item, splits), [np.ones((size, 2), np.float32)])

            raises(REFUSED, exchange, text)
        for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
            raises(REFUSED, lambda mode=mode, call=call: mode(call, [np.float32(1.0)]), "dimension")
    raises(ValueError, lambda: hvd.allreduce(tf.ones(1), average=True, op=hvd.Sum), "average")


def check_objects_variables_and_the_rest() -> None:
    size, rank = hvd.size(), hvd.rank()
    makers = (hvd.size_op, hvd.rank_op, hvd.local_rank_op, hvd.local_size_op, hvd.process_set_included_op)
    for mode in MODES:
        values = mode(lambda: [make() for make in makers], [])
        assert values == [hvd.size(), hvd.rank(), hvd.local_rank(), hvd.local_size(), 1]
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    assert hvd.broadcast_object_fn(0)("x" * (rank + 1)) == "x"
    assert hvd.allgather_object(rank) == list(range(size))
    variables = [tf.Variable(np.full(2, rank, np.float32)), tf.Variable(rank, dtype=tf.int64)]
    hvd.broadcast_variables(variables, root_rank=size - 1)
    assert [float(np.max(item.numpy())) for item in variables] == [size - 1] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(hvd.allreduce(tf.constant(1.0), average=False).numpy(), size)
    raises(RuntimeError, lambda: hvd.broadcast_global_variables(0), "broadcast_variables(model.variables")


def check_join_with_uneven_data() -> None:
    for _ in range(2 + hvd.rank()):
        hvd.allreduce(tf.ones(3), op=hvd.Sum, name="uneven")
    assert hvd.join() == hvd.size() - 1 or hvd.size() == 1
