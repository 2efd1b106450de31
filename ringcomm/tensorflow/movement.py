"""The public collectives on TensorFlow tensors that move them as they are."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import tensorflow as tf

from .._tensorflow import bridge
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from . import flow


@documented
def allgather(
    tensor: Any,
    name: Optional[str] = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    Args:
        tensor: a dense tensor with at least one dimension. The first dimension may differ between ranks; all
            other dimensions and the dtype may not.
        {tf_matching}

    Returns:
        a new tensor, the same on all ranks. It is differentiable; the gradient is this rank's rows of the
        averaged gradients.

    Raises:
        NotImplementedError: the tensor is ``tf.IndexedSlices``.
        ShapeError: the tensor has no dimensions.
        MismatchError: dtypes or other dimensions than the first differ between ranks.
        PeerLostError: a rank was lost.
    """
    (result,) = grouped_allgather([tensor], name, ignore_name_scope, process_set)
    return result


@documented
def grouped_allgather(
    tensors: Sequence[Any],
    name: Optional[str] = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> List[tf.Tensor]:
    """Concatenate several tensors of all ranks, each along its first dimension, in one operation.

    Args:
        tensors: dense tensors with at least one dimension; all ranks pass the same number of them. The first
            dimensions may differ between ranks; all other dimensions and the dtypes may not.
        {tf_matching}

    Returns:
        new tensors in the order of the inputs, the same on all ranks. They are differentiable.

    Raises:
        NotImplementedError: one of them is ``tf.IndexedSlices``.
        ShapeError: one of them has no dimensions.
        MismatchError: dtypes or other dimensions than the first differ between ranks.
        PeerLostError: a rank was lost.
    """
    given = flow.dense(tensors, "allgather")
    return flow.gather(process_set, bridge.name_of(name, "allgather", given), given)


@documented
def broadcast(
    tensor: Any,
    root_rank: int,
    name: Optional[str] = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Send the root's tensor to all ranks.

    Args:
        tensor: a dense tensor, of the same shape and dtype on all ranks; only the root's values are used.
        {root_rank}
        {tf_matching}

    Returns:
        a new tensor with the root's values. It is differentiable; the root gets the averaged gradients, all
        other ranks zeros.

    Raises:
        NotImplementedError: the tensor is ``tf.IndexedSlices``.
        MismatchError: shapes, dtypes or roots differ between ranks.
        PeerLostError: a rank was lost.
    """
    given = flow.dense([tensor], "broadcast")
    (result,) = flow.spread(root_rank, process_set, bridge.name_of(name, "broadcast", given), given)
    return result


@documented
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: Optional[str] = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of a tensor to every rank and receive rows from every rank.

    Args:
        tensor: a dense tensor with at least one dimension. The first dimension may differ between ranks; all
            other dimensions and the dtype may not.
        splits: int32 tensor or list with the number of rows for each rank, in rank order; its sum is the
            number of rows. None: every rank gets the same number.
        {tf_matching}

    Returns:
        the received rows in rank order; with ``splits`` a pair of these rows and an int32 tensor with the
        number of rows from each rank. The rows are differentiable.

    Raises:
        NotImplementedError: the tensor is ``tf.IndexedSlices``.
        ConfigError: ``splits`` does not match the tensor or the number of ranks, or rows cannot be divided
            evenly without it.
        MismatchError: dtypes or other dimensions than the first differ between ranks.
        PeerLostError: a rank was lost.
    """
    given = flow.dense([tensor], "alltoall")
    counts = tf.convert_to_tensor(flow.NO_SPLITS if splits is None else splits)
    label = bridge.name_of(name, "alltoall", given)
    rows, received = flow.exchange(process_set, label, given[0], counts)
    return rows if splits is None else (rows, received)
