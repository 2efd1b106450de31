"""The public collectives on trees of MLX arrays. A call returns when its result is there."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

import mlx.core as mx
import numpy as np

from .._adapter.arguments import scattered_reduction
from .._adapter.compression import Compression
from .._adapter.graph_callbacks import Batch, Operation
from .._adapter.reduction import Reduction
from .._adapter.trees import put_together, take_apart
from ..calls.process_set import ProcessSet, global_process_set, size_of
from ..collective.rows import row_counts
from ..docstrings import documented
from ..errors import ConfigError
from ..ops import ReduceOp, op_of
from .arrays import Blocks, from_host, to_host


@documented
def allreduce(
    tree: Any,
    op: Optional[ReduceOp] = None,
    name: Optional[str] = None,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: Optional[float] = None,
) -> Any:
    """Reduce all arrays of a tree over all ranks, in one operation; every rank gets the results.

    Example: ``loss = hvd.allreduce(loss)``.

    Args:
        {mlx_tree}
        {op}
        {name}
        {compression}
        {prescale_factor}
        {postscale_factor}
        {process_set}
        {weight}

    Returns:
        a new tree of the input's structure, shapes and dtypes, bit-identical on all ranks. With Average and
        Sum, without weights, it is differentiable; the gradient is the same reduction of all gradients.

    Raises:
        {mlx_errors}
    """
    how = Reduction(
        ReduceOp.AVERAGE if op is None else op_of(op), float(prescale_factor), float(postscale_factor),
        process_set, compression=compression,
    )  # fmt: skip
    structure, arrays = _leaves(tree)
    if not arrays:
        return tree
    reduce = _with_gradient(how, name) if how.adds and weight is None else _reducing(how, name, weight)
    return put_together(structure, reduce(*arrays))


def _reducing(how: Reduction, name: Optional[str], weight: Optional[float]) -> Callable[..., List[mx.array]]:
    def reduce(*arrays: mx.array) -> List[mx.array]:
        executed, sent, restore = how.prepared(arrays)
        inputs = len(sent) + (weight is not None)
        operation = Operation("allreduce", executed, name, inputs, has_weight=weight is not None)
        return restore(overwritten(operation, sent, weight))

    return reduce


def _with_gradient(how: Reduction, name: Optional[str]) -> Callable[..., List[mx.array]]:
    forward = mx.custom_function(_reducing(how, name, None))

    @forward.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> List[mx.array]:
        del primals, outputs
        return _reducing(how, name and f"{name}.gradient", None)(*cotangents)

    reduce: Callable[..., List[mx.array]] = forward
    return reduce


def overwritten(operation: Operation, arrays: Sequence[mx.array], weight: Optional[float]) -> List[mx.array]:
    """Execute an operation whose results have the shapes of its inputs; returns new arrays."""
    by_dtype: Dict[Any, List[int]] = {}
    for index, array in enumerate(arrays):
        by_dtype.setdefault(str(array.dtype), []).append(index)
    blocks = Blocks(arrays, list(by_dtype.values()))
    views = [*blocks.views(), *([weight] if weight is not None else [])]
    Batch([operation]).overwrite(views)
    return blocks.results()


@documented
def allgather(tree: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the arrays of all ranks along their first dimension, in rank order.

    Args:
        tree: a tree of arrays with at least one dimension, the first of which may differ between ranks.
        {name}
        {process_set}

    Returns:
        a new tree, the same on all ranks.

    Raises:
        ShapeError: an array has no dimensions.
        {mlx_errors}
    """
    return _rows("allgather", tree, name, Reduction(process_set=process_set))


@documented
def broadcast(
    tree: Any, root_rank: int = 0, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send the root's arrays to all ranks.

    Args:
        {mlx_tree}
        {root_rank}
        {name}
        {process_set}

    Returns:
        a new tree with the root's values.

    Raises:
        {mlx_errors}
    """
    structure, arrays = _leaves(tree)
    if not arrays:
        return tree
    operation = Operation("broadcast", Reduction(process_set=process_set), name, len(arrays), root_rank)
    return put_together(structure, overwritten(operation, arrays, None))


@documented
def reducescatter(
    tree: Any,
    op: Optional[ReduceOp] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce all arrays of a tree over all ranks; every rank gets its part of the rows.

    Rows are divided evenly; where that leaves a remainder of r rows, the first r ranks get one row more.

    Args:
        tree: a tree of arrays with at least one dimension, of the same structure, shapes and dtypes on all
            ranks.
        {scatter_op}
        {name}
        {process_set}
        {prescale_factor}
        {postscale_factor}

    Returns:
        a new tree with this rank's rows.

    Raises:
        NotOfferedError: the op is Adasum.
        ShapeError: an array has no dimensions.
        {mlx_errors}
    """
    chosen = scattered_reduction(ReduceOp.AVERAGE if op is None else op)
    how = Reduction(chosen, float(prescale_factor), float(postscale_factor), process_set)
    return _rows("reducescatter", tree, name, how)


@documented
def alltoall(
    x: mx.array,
    splits: Optional[Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of an array to every rank, and receive rows from every rank.

    Args:
        x: an array with at least one dimension.
        {splits}
        {name}
        {process_set}

    Returns:
        the received rows in rank order; with ``splits`` a pair of them and their numbers by rank (int32).

    Raises:
        ConfigError: the splits do not match the rows or the ranks.
        ShapeError: the array has no dimensions.
        {mlx_errors}
    """
    _, (array,) = _leaves(x)
    counts = None if splits is None else np.asarray(splits).tolist()
    if array.ndim:
        row_counts(array.shape[0], counts, size_of(process_set))
    operation = Operation("alltoall", Reduction(process_set=process_set), name, 2)
    received, numbers = map(from_host, Batch([operation]).run([to_host(array), counts or []]))
    return received if splits is None else (received, numbers)


def _rows(kind: str, tree: Any, name: Optional[str], how: Reduction) -> Any:
    structure, arrays = _leaves(tree)
    if not arrays:
        return tree
    found = Batch([Operation(kind, how, name, len(arrays))]).run([to_host(array) for array in arrays])
    return put_together(structure, [from_host(array) for array in found])


def _leaves(tree: Any) -> Any:
    """The structure of a tree, and its leaves as MLX arrays."""
    structure, leaves = take_apart(tree, lambda node: not isinstance(node, (dict, list, tuple, type(None))))
    return structure, [_array(leaf) for leaf in leaves]


def _array(leaf: Any) -> mx.array:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return from_host(np.asarray(leaf))
    if not isinstance(leaf, (mx.array, int, float)):
        raise ConfigError(
            f"Collectives work on trees of MLX arrays and numbers, not on a {type(leaf).__name__}."
        )
    return leaf if isinstance(leaf, mx.array) else mx.array(leaf)
