"""What every rank checks about collectives, in each way of running them, against NumPy in float64.

Each type, operation and form once; every combination of them is tried without a framework, in
tests/integration/collective and engine.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd
from ringcomm.errors import HorovodInternalError, Misuse
from tests.adapters.jobs import close, everybodys, numbers, same_everywhere
from tests.adapters.signatures import functions_of
from tests.adapters.tensorflow.modes import MODES, session_of_a_graph
from tests.support.errors import raises
from tests.support.options import compare_forms

tf1 = tf.compat.v1

FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
INTEGERS = [tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64]
OPS = {
    hvd.Average: lambda all_of_them: all_of_them.sum(0) / len(all_of_them),
    hvd.Sum: lambda all_of_them: all_of_them.sum(0),
    hvd.Min: lambda all_of_them: all_of_them.min(0),
    hvd.Max: lambda all_of_them: all_of_them.max(0),
    hvd.Product: lambda all_of_them: all_of_them.prod(0),
}


def types() -> list[Any]:
    return [(salt, dtype.as_numpy_dtype) for salt, dtype in enumerate(FLOATS + INTEGERS)]


def rows_of(rank: int) -> int:
    return rank + 1


def check_ranks_and_sizes() -> None:
    assert hvd.is_initialized() and hvd.is_homogeneous() and hvd.gloo_built() and not hvd.mpi_built()
    for mode in MODES:
        values = mode(
            lambda: [hvd.size_op(), hvd.rank_op(), hvd.local_rank_op(), hvd.local_size_op(),
                     hvd.process_set_included_op()], []
        )  # fmt: skip
        assert values == [hvd.size(), hvd.rank(), hvd.local_rank(), hvd.local_size(), 1]


def check_every_reduction() -> None:
    size, rank = hvd.size(), hvd.rank()
    shape = (2 * size + 1, 2)
    start = rank * 2 + min(rank, 1)
    own = slice(start, start + 2 + (rank == 0))
    cases = [(salt, dtype, hvd.Sum) for salt, dtype in types()]
    cases += [(20 + op, np.float32, op) for op in OPS]
    scalars = [numbers(rank, empty, np.float32, 40) for empty in ((), (0, 3))]

    def function(*tensors: Any) -> Any:
        return [
            *(hvd.allreduce(tensor, op=op) for tensor, (_, _, op) in zip(tensors, cases)),
            *(hvd.reducescatter(tensor, op=op) for tensor, (_, _, op) in zip(tensors, cases)),
            *map(hvd.allreduce, tensors[len(cases) :]),
        ]

    mine = [numbers(rank, shape, dtype, salt) for salt, dtype, _ in cases]
    for mode in MODES:
        results = mode(function, [*mine, *scalars])
        for at, (salt, dtype, op) in enumerate(cases):
            whole = OPS[op](everybodys(shape, dtype, salt))
            close(results[at], whole)
            close(results[len(cases) + at], whole[own])
            assert np.asarray(results[at]).dtype == np.dtype(dtype)
        for result, scalar in zip(results[2 * len(cases) :], scalars):
            close(result, everybodys(scalar.shape, np.float32, 40).mean(0))
        reduced = [*results[: len(cases)], *results[2 * len(cases) :]]
        same_everywhere(np.concatenate([np.ravel(item).astype(np.float64) for item in reduced]))


def check_movement_of_every_type() -> None:
    shape = (2, 3)
    size, rank = hvd.size(), hvd.rank()
    for salt, dtype in [*types(), (99, np.bool_)]:
        mine = numbers(rank, shape, dtype, salt)
        ragged = numbers(rank, (rows_of(rank), 3), dtype, salt)
        even = numbers(rank, (size * 2, 2), dtype, salt)
        all_rows = np.concatenate([numbers(other, (rows_of(other), 3), dtype, salt) for other in range(size)])
        for mode in MODES:
            gathered, sent, reduced = mode(
                lambda a, b, c: [hvd.allgather(a), hvd.broadcast(b, size - 1), hvd.alltoall(c)],
                [ragged, mine, even],
            )
            assert np.array_equal(gathered, all_rows)
            assert np.array_equal(sent, numbers(size - 1, shape, dtype, salt))
            parts = [
                numbers(other, (size * 2, 2), dtype, salt)[rank * 2 : rank * 2 + 2] for other in range(size)
            ]
            assert np.array_equal(reduced, np.concatenate(parts))


def check_reducescatter_and_splits() -> None:
    size, rank = hvd.size(), hvd.rank()
    rows = 2 * size + 1
    mine = numbers(rank, (rows, 2), np.float32, 5)
    all_rows = everybodys((rows, 2), np.float32, 5)
    start = rank * 2 + min(rank, 1)
    own = slice(start, start + 2 + (rank == 0))
    splits = np.arange(1, size + 1, dtype=np.int32)
    sent = numbers(rank, (int(splits.sum()), 2), np.int64, 6)
    first = sum(range(1, rank + 1))
    expected = np.concatenate([
        numbers(other, (int(splits.sum()), 2), np.int64, 6)[first : first + rank + 1] for other in range(size)
    ])  # fmt: skip

    def function(tensor: Any, rows_to_send: Any) -> Any:
        return [
            hvd.reducescatter(tensor), hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=0.5),
            *hvd.grouped_reducescatter([tensor, tensor * 2], op=hvd.Max),
            *hvd.alltoall(rows_to_send, splits),
        ]  # fmt: skip

    for mode in MODES:
        average, half, largest, doubled, received, counts = mode(function, [mine, sent])
        close(average, all_rows.mean(0)[own])
        close(half, all_rows.sum(0)[own] / 2)
        close(largest, all_rows.max(0)[own])
        close(doubled, all_rows.max(0)[own] * 2)
        assert np.array_equal(received, expected)
        assert counts.tolist() == [rank + 1] * size


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
                hvd.allreduce(tensor, op=hvd.Average) * own,
                hvd.allreduce(tensor, op=hvd.Sum, name="named") * own,
                hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0) * own,
                hvd.allgather(tensor) * all_rows,
                hvd.broadcast(tensor, size - 1) * own,
                hvd.reducescatter(tensor, op=hvd.Sum) * own[:1],
                hvd.reducescatter(tensor, op=hvd.Average) * own[:1],
                hvd.alltoall(tensor) * own,
                hvd.grouped_allreduce([tensor, tensor])[1] * own,
                hvd.grouped_allgather([tensor, 3 * tensor])[1] * all_rows,
                hvd.grouped_reducescatter([tensor, 3 * tensor], op=hvd.Average)[1] * own[:1],
                hvd.alltoall(tensor, splits=[0] * (size - 1) + [size])[0]
                * (weights_of_all if rank == size - 1 else weights_of_all[:0]),
                hvd.allreduce(tf.cast(tensor, tf.float64), op=hvd.Sum) * tf.cast(own, tf.float64),
            ]
        return [tape.gradient(loss, tensor) for loss in losses]

    first_rows = np.concatenate([weight[:1] for weight in weights])
    all_rows = np.mean([wide + other for other in range(size)], axis=0)[rank * size : (rank + 1) * size]
    expected = [
        mean, mean * size, mean * size * 6, all_rows, mean if rank == size - 1 else mean * 0,
        first_rows * size, first_rows, np.concatenate([weight[rank : rank + 1] for weight in weights]), mean,
        all_rows * 3, first_rows * 3, weights[rank], mean * size,
    ]  # fmt: skip
    for mode in MODES:
        for found, wanted in zip(mode(function, [mine]), expected):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def check_that_infinite_gradients_reach_the_root_of_a_broadcast_only() -> None:
    def function(tensor: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = hvd.broadcast(tensor, 0) * np.float32("inf")
        return [tape.gradient(loss, tensor)]

    for mode in MODES:
        (found,) = mode(function, [np.ones(2, np.float32)])
        assert np.array_equal(found, [np.inf, np.inf] if hvd.rank() == 0 else [0, 0]), found


def check_indexed_slices() -> None:
    size, rank = hvd.size(), hvd.rank()
    values, indices = numbers(rank, (2, 3), np.float32, 10), np.array([rank, size], np.int64)
    expected = np.zeros((size + 1, 3))
    for other in range(size):
        theirs = numbers(other, (2, 3), np.float32, 10)
        expected[other] += theirs[0]
        expected[size] += theirs[1]

    def function(amounts: Any, places: Any) -> Any:
        slices = tf.IndexedSlices(amounts, places, dense_shape=tf.constant([size + 1, 3], tf.int64))
        return [
            tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum)),
            tf.convert_to_tensor(hvd.allreduce(slices, compression=hvd.Compression.fp16)),
        ]

    for mode in MODES:
        total, average = mode(function, [values, indices])
        np.testing.assert_allclose(total, expected, rtol=1e-6)
        np.testing.assert_allclose(average, expected / size, rtol=1e-3)
    slices = tf.IndexedSlices(values, indices, dense_shape=[size + 1, 3])
    for call in (
        lambda: hvd.allreduce(slices, op=hvd.Max),
        lambda: hvd.allreduce(slices, prescale_factor=2.0),
        lambda: hvd.allgather(slices),
        lambda: hvd.broadcast(slices, 0),
        lambda: hvd.reducescatter(slices),
        lambda: hvd.alltoall(slices),
    ):
        raises(NotImplementedError, call)


def check_any_order_on_one_thread() -> None:
    """In a graph without an order, with one thread, and every rank with an order of its own.

    Callbacks that wait where they submit hang here: each rank's thread waits for an operation that the
    other rank's thread has not come to.
    """
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


def check_grouped_and_compressed() -> None:
    shapes = [(3,), (), (2, 2)]
    mine = [numbers(hvd.rank(), shape, np.float32, 11 + at) for at, shape in enumerate(shapes)]
    for mode in MODES:
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            results = mode(
                lambda *tensors: hvd.grouped_allreduce(tensors, compression=compression, name="group"),  # noqa: B023
                mine,
            )
            for at, (result, shape) in enumerate(zip(results, shapes)):
                expected = everybodys(shape, np.float32, 11 + at).mean(0)
                assert result.dtype == np.float32
                np.testing.assert_allclose(result, expected, rtol=1e-2, atol=2e-2)


def check_the_same_place_again_and_again() -> None:
    """A loop in a graph comes round to the same operation before its last round is forgotten."""

    @tf.function
    def loop(start: Any) -> Any:
        total = start
        for _ in tf.range(20):
            total = hvd.allreduce(total, op=hvd.Average, name="again") + 1.0
        return total

    close(loop(tf.constant(float(hvd.rank()))).numpy(), (hvd.size() - 1) / 2 + 20)


def check_errors_are_ringcomms_too() -> None:
    if hvd.size() == 1:
        return
    error = raises(
        tf.errors.FailedPreconditionError,
        lambda: hvd.allreduce(tf.zeros(2 + hvd.rank() % 2), name="misshapen"),
        "Mismatched allreduce tensor shapes",
    )
    assert isinstance(error, HorovodInternalError) and isinstance(error, Misuse), type(error)


def check_process_sets() -> None:
    evens = hvd.add_process_set(list(range(0, hvd.size(), 2))) if hvd.size() > 1 else None
    if evens is None:
        return
    if evens.included():
        for mode in MODES:
            total, gathered = mode(
                lambda item: [
                    hvd.allreduce(item, op=hvd.Sum, process_set=evens),
                    hvd.allgather(item, process_set=evens),
                ],
                [np.full(1, hvd.rank(), np.float32)],
            )
            assert total.tolist() == [sum(evens.ranks)] and gathered.tolist() == evens.ranks
    assert hvd.remove_process_set(evens)


def check_every_form_with_every_option() -> None:
    names = [name for name in functions_of("ringcomm.tensorflow") if name != "broadcast_"]  # of variables
    ranks = list(range(hvd.size()))
    assert compare_forms(hvd, names, ranks, hvd.rank(), hvd.global_process_set, tf.constant, np.asarray) > 30


def check_objects_variables_and_the_rest() -> None:
    size, rank = hvd.size(), hvd.rank()
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    assert hvd.broadcast_object_fn(0)("x" * (rank + 1)) == "x"
    assert hvd.allgather_object(rank) == list(range(size))
    variables = [tf.Variable(np.full(2, rank, np.float32)), tf.Variable(rank, dtype=tf.int64)]
    hvd.broadcast_variables(variables, root_rank=size - 1)
    assert [float(np.max(item.numpy())) for item in variables] == [size - 1] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(hvd.allreduce(tf.constant(1.0), average=False).numpy(), size)
    hvd.barrier()
    raises(RuntimeError, lambda: hvd.broadcast_global_variables(0))  # there is no graph here


def check_join_with_uneven_data() -> None:
    for _ in range(2 + hvd.rank()):
        hvd.allreduce(tf.ones(3), op=hvd.Sum, name="uneven")
    assert hvd.join() == hvd.size() - 1 or hvd.size() == 1
