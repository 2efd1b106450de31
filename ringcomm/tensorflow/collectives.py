"""The collectives on tensors, as programs call them."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Union

import tensorflow as tf

from .._adapter import graph_callbacks
from .._adapter.arguments import reduction
from .._adapter.gradients import Reduction
from .._tensorflow import bridge
from .._tensorflow.compression import Compression
from ..collective.call_sites import look_through
from ..ops import ReduceOp, op_of
from ..process_set import ProcessSet, global_process_set
from . import flow

look_through(tf)

Tensor = Union[tf.Tensor, tf.IndexedSlices]


def allreduce(
    tensor: Any,
    average: Optional[bool] = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Tensor:
    """Reduce a tensor of the same shape and type from every rank; every rank gets the result.

    Of ``tf.IndexedSlices`` the result has everybody's slices, divided by the number of ranks for Average.

    Args:
        average: deprecated; use ``op``.
        compression: how the tensor travels.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies every contribution before, ``postscale_factor`` the result after.
        name: what the operation is called; ranks' operations of one name belong together. Without it those
            in the same place of the graph do, and outside of graphs those that come at the same turn.
        process_set: the ranks that take part.
        device_dense, device_sparse, ignore_name_scope: without effect; Horovod has them.

    Returns:
        a new tensor, bit-identical on all ranks, through which gradients flow.

    Raises:
        NotImplementedError: there is no such reduction of ``tf.IndexedSlices``.
    """
    how = Reduction(reduction(op, average), float(prescale_factor), float(postscale_factor), process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return _reduce_slices(tensor, how, compression, name)
    (result,) = _reduce([tensor], how, compression, name)
    return result


def grouped_allreduce(
    tensors: Sequence[Any],
    average: Optional[bool] = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: Optional[str] = None,
) -> List[Tensor]:
    """Like :func:`allreduce` for several tensors, all of them or none."""
    how = Reduction(reduction(op, average), float(prescale_factor), float(postscale_factor), process_set)
    results: List[Any] = list(tensors)
    dense = [index for index, item in enumerate(results) if not isinstance(item, tf.IndexedSlices)]
    for index, item in enumerate(results):
        if isinstance(item, tf.IndexedSlices):
            label = None if name is None else f"{name}.{index}"
            results[index] = _reduce_slices(item, how, compression, label)
    reduced = _reduce([results[index] for index in dense], how, compression, name)
    for index, item in zip(dense, reduced):
        results[index] = item
    return results


def _reduce(tensors: Sequence[Any], how: Reduction, compression: Any, name: Optional[str]) -> List[tf.Tensor]:
    if not tensors:
        return []
    given = [tf.convert_to_tensor(item) for item in tensors]
    pairs = [compression.compress(item) for item in given]
    label = bridge.name_of(name, "allreduce", given)
    reduced = flow.reduce(how, label, [compressed for compressed, _ in pairs])
    return [compression.decompress(item, context) for item, (_, context) in zip(reduced, pairs)]


def _reduce_slices(
    slices: tf.IndexedSlices, how: Reduction, compression: Any, name: Optional[str]
) -> tf.IndexedSlices:
    if how.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise NotImplementedError(
            f"tf.IndexedSlices can be averaged and summed, not reduced by {how.op.name.capitalize()}: use "
            "sparse_as_dense=True or tf.convert_to_tensor()."
        )
    if (how.prescale, how.postscale) != (1.0, 1.0):
        raise NotImplementedError("tf.IndexedSlices are not scaled: use tf.convert_to_tensor() first.")
    values, context = compression.compress(slices.values)
    label = bridge.name_of(name, "allreduce", [values])
    values, indices = flow.gather(how.process_set, label, [values, slices.indices])
    values = compression.decompress(values, context)
    if how.op == ReduceOp.AVERAGE:
        values = values / tf.cast(how.process_set.size(), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor of which every rank gets its rows only: the first ranks one more if uneven."""
    (result,) = grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, prescale_factor, postscale_factor, name
    )
    return result


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: Optional[str] = None,
) -> List[tf.Tensor]:
    """Like :func:`reducescatter` for several tensors, all of them or none."""
    how = Reduction(op_of(op), float(prescale_factor), float(postscale_factor), process_set)
    given = _dense(tensors, "reducescatter")
    pairs = [compression.compress(item) for item in given]
    label = bridge.name_of(name, "reducescatter", given)
    reduced = flow.scatter(how, label, [compressed for compressed, _ in pairs])
    return [compression.decompress(item, context) for item, (_, context) in zip(reduced, pairs)]


def allgather(
    tensor: Any,
    name: Optional[str] = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Collect every rank's rows, in rank order; how many there are may differ from rank to rank."""
    (result,) = grouped_allgather([tensor], name, ignore_name_scope, process_set)
    return result


def grouped_allgather(
    tensors: Sequence[Any],
    name: Optional[str] = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> List[tf.Tensor]:
    """Like :func:`allgather` for several tensors, all of them or none."""
    given = _dense(tensors, "allgather")
    return flow.gather(process_set, bridge.name_of(name, "allgather", given), given)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: Optional[str] = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The root's tensor, on every rank; all pass one of the same shape and type.

    Args:
        root_rank: a rank of the job, also if only a process set takes part.
    """
    given = _dense([tensor], "broadcast")
    (result,) = flow.spread(root_rank, process_set, bridge.name_of(name, "broadcast", given), given)
    return result


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: Optional[str] = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank and receive rows from every rank.

    Args:
        splits: how many rows go to each rank; without it they are dealt out evenly.

    Returns:
        the received rows in rank order; with ``splits`` a pair, the second of which says how many came
        from each rank.
    """
    given = _dense([tensor], "alltoall")
    counts = tf.convert_to_tensor(flow.NO_SPLITS if splits is None else splits)
    label = bridge.name_of(name, "alltoall", given)
    rows, received = flow.exchange(process_set, label, given[0], counts)
    return rows if splits is None else (rows, received)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank has come here. Outside of graphs only."""
    graph_callbacks.Batch([graph_callbacks.Barrier(process_set)]).run([])


def _dense(tensors: Sequence[Any], what: str) -> List[tf.Tensor]:
    for item in tensors:
        if isinstance(item, tf.IndexedSlices):
            raise NotImplementedError(f"{what} works on dense tensors: use tf.convert_to_tensor() first.")
    return [tf.convert_to_tensor(item) for item in tensors]
