"""What programs written for Horovod rely on besides the collectives' results, in each way of running them."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

import numpy as np
import tensorflow as tf

import ringcomm.tensorflow as hvd
from tests.adapters.jobs import operations_with_a_set
from tests.adapters.tensorflow.modes import MODES, in_a_graph, session_of_a_graph
from tests.support.errors import raises

tf1 = tf.compat.v1


def check_gradients_with_process_sets() -> None:
    """Each operation's gradient among the ranks of a set: (how it is called, what comes of ones)."""
    if hvd.size() == 1:
        return
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    odd = hvd.add_process_set(list(range(1, hvd.size(), 2)))
    mine, other = (odd, even) if hvd.rank() % 2 else (even, odd)
    members = mine.size()
    root = mine.ranks[-1]
    operations = operations_with_a_set(hvd, mine, root)

    def all_gradients(source: Any) -> Any:
        found = []
        for operation, _ in operations.values():
            with tf.GradientTape() as tape:
                tape.watch(source)
                result = operation(source, mine)
            found.append(tape.gradient(result, source, tf.ones_like(result)))
        return found

    start = np.full((2 * members, 3), float(mine.rank()), np.float32)
    for mode in MODES:
        for found, (name, (_, wanted)) in zip(mode(all_gradients, [start]), operations.items()):
            np.testing.assert_allclose(found, np.full_like(start, wanted), err_msg=f"{mode.__name__}: {name}")
        for operation, _ in operations.values():
            errors = (tf.errors.InvalidArgumentError, ValueError)
            raises(
                errors, lambda mode=mode, op=operation: mode(lambda item: op(item, other), [start]), "member"
            )
    values = in_a_graph(
        lambda: [
            hvd.size_op(mine.process_set_id), hvd.process_set_included_op(mine.process_set_id),
            hvd.process_set_included_op(other.process_set_id),
        ],
        [],
    )  # fmt: skip
    assert values == [members, 1, 0]
    assert hvd.allgather_object(hvd.rank(), process_set=mine) == mine.ranks
    assert hvd.broadcast_object(hvd.rank(), root, process_set=mine) == root
    assert hvd.broadcast_object_fn(root, process_set=mine)(hvd.rank()) == root
    tape_and_optimizer_with_a_set(even)
    hvd.barrier()
    assert hvd.remove_process_set(even) and hvd.remove_process_set(odd)


def tape_and_optimizer_with_a_set(even: Any) -> None:
    """Ranks that are not in the set train alone."""
    wanted = sum(even.ranks) / even.size() if even.included() else float(hvd.rank())
    variable = tf.Variable(float(hvd.rank()))
    with tf.GradientTape() as tape:
        loss = variable * variable
    gradients = hvd.DistributedGradientTape(tape, process_set=even).gradient(loss, [variable])
    np.testing.assert_allclose(gradients[0].numpy(), 2 * wanted)
    with session_of_a_graph() as session:
        place = tf1.get_variable("place", initializer=[0.0], use_resource=True)
        own = tf1.train.GradientDescentOptimizer(1.0)
        optimizer = hvd.DistributedOptimizer(own, process_set=even, average_aggregated_gradients=True)
        assert optimizer._optimizer is own
        step = optimizer.minimize(-place * float(hvd.rank()), var_list=[place])
        session.run(tf1.global_variables_initializer())
        session.run(step)
        np.testing.assert_allclose(session.run(place), [wanted])


def check_ids_that_no_process_set_has() -> None:
    fake = hvd.ProcessSet([0])
    raises(ValueError, lambda: hvd.allreduce(tf.ones(4), process_set=fake), "registered")
    fake.process_set_id = 10
    calls: Dict[str, Callable[[Any], Any]] = {
        "allreduce": lambda item: hvd.allreduce(item, process_set=fake),
        "allgather": lambda item: hvd.allgather(item, process_set=fake),
        "broadcast": lambda item: hvd.broadcast(item, 0, process_set=fake),
        "alltoall": lambda item: hvd.alltoall(item, process_set=fake),
        "reducescatter": lambda item: hvd.reducescatter(item, process_set=fake),
    }
    for call in calls.values():
        for mode in MODES:
            item = np.ones(hvd.size(), np.float32)
            raises(ValueError, lambda mode=mode, call=call, item=item: mode(call, [item]), "Process set 10")


def check_what_ranks_disagree_about() -> None:
    """It is FailedPreconditionError everywhere, and nothing is broken after it."""
    if hvd.size() == 1:
        return
    odd, size = hvd.rank() % 2 == 1, hvd.size()
    mixed = [np.ones(size * (2 if odd else 1), np.float32)]
    typed = [np.ones(size, np.int32 if odd else np.float32)]
    calls: Dict[str, Tuple[Callable[[Any], Any], Any]] = {
        "operations": (lambda item: hvd.allreduce(item, op=hvd.Sum if odd else hvd.Max), [np.ones(2)]),
        "shapes": (lambda item: hvd.reducescatter(item, name="a"), mixed),
        "types": (lambda item: hvd.allgather(item, name="b"), typed),
        "types of alltoall": (lambda item: hvd.alltoall(item, name="c"), typed),
        "roots": (lambda item: hvd.broadcast(item, 1 if odd else 0, name="d"), [np.ones(2, np.float32)]),
    }
    for mode in MODES:
        for call, arrays in calls.values():
            kind = tf.errors.FailedPreconditionError
            raises(kind, lambda mode=mode, call=call, arrays=arrays: mode(call, arrays), "Mismatched")
        ((total,),) = mode(
            lambda item: hvd.allreduce(item, op=hvd.Sum, name="after"), [np.ones(1, np.float32)]
        )
        assert total == size


def check_what_a_rank_is_told_at_once() -> None:
    size = hvd.size()
    local = (tf.errors.InvalidArgumentError, ValueError)
    too_many, too_large = [1] * size + [0], [2] + [1] * (size - 1)
    for mode in MODES:
        for splits, text in ((too_many, "number of workers"), (too_large, "first dimension")):

            def exchange(mode: Any = mode, splits: Any = splits) -> Any:
                return mode(lambda item: hvd.alltoall(item, splits), [np.ones((size, 2), np.float32)])

            raises(local, exchange, text)
        scalar = [np.float32(1.0)]
        kinds = (tf.errors.OpError, ValueError)
        for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
            raises(kinds, lambda mode=mode, call=call, scalar=scalar: mode(call, scalar), "dimension")
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    for call in (
        hvd.allgather, hvd.alltoall, hvd.reducescatter, lambda item: hvd.broadcast(item, 0),
        lambda item: hvd.allreduce(item, op=hvd.Max), lambda item: hvd.allreduce(item, prescale_factor=2.0),
        lambda item: hvd.grouped_allgather([item]), lambda item: hvd.grouped_reducescatter([item]),
        lambda item: hvd.grouped_allreduce([item], op=hvd.Min),
    ):  # fmt: skip
        raises(NotImplementedError, lambda call=call: call(slices), "tf.")
    raises(ValueError, lambda: hvd.allreduce(tf.ones(1), average=True, op=hvd.Sum), "average")


def check_the_names_under_which_scripts_look() -> None:
    from ringcomm.tensorflow import mpi_ops
    from ringcomm.tensorflow.compression import Compression, Compressor, FP16Compressor, NoneCompressor
    from ringcomm.tensorflow.mpi_ops import Sum, allreduce, rank_op, size
    from ringcomm.tensorflow.util import _executing_eagerly, refs_to_vars, vars_to_refs

    assert mpi_ops is hvd.mpi_ops and size() == hvd.size() and int(rank_op()) == hvd.rank()
    assert allreduce(tf.ones(2), op=Sum).numpy().tolist() == [hvd.size()] * 2
    assert mpi_ops._basics._get_process_set_ids_and_ranks() == {0: list(range(hvd.size()))}
    assert _executing_eagerly() and hvd._executing_eagerly() and not in_a_graph_it_does()
    assert Compression is hvd.Compression and issubclass(FP16Compressor, Compressor)
    assert [Compression.none, Compression.fp16] == [NoneCompressor, FP16Compressor]
    variables = [tf.Variable(1.0), [tf.Variable(2.0)]]
    assert hash(vars_to_refs(variables)) == hash(vars_to_refs(variables))
    assert refs_to_vars(vars_to_refs(variables))[1][0] is variables[1][0]


def in_a_graph_it_does() -> bool:
    with tf.Graph().as_default():
        return hvd._executing_eagerly()
