"""Collectives on trees of MLX arrays, and training with them. A call returns when its result is there."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import mlx.core as mx
import mlx.optimizers
import numpy as np
from mlx.nn import Module
from mlx.utils import tree_flatten

from .._adapter.compression import AutoCompression, Compression, register_cast
from .._adapter.gradients import Gradient, bucket_name, check_start, plan_buckets
from .._adapter.graph_callbacks import (
    Batch,
    CompressionState,
    Operation,
    TreeCollectives,
    put_together,
    take_apart,
)
from .._adapter.reduction import Reduction, of_gradients, wrapped
from .._adapter.submit import broadcast_object
from ..calls.process_set import ProcessSet, global_process_set
from ..collective.observe import look_through
from ..collective.options import Options, takes
from ..docstrings import documented
from ..dtypes import Array, dtype_named
from ..errors import ConfigError, NotOfferedError
from ..ops import ReduceOp

__all__ = [
    "DistributedOptimizer", "allgather", "allreduce", "alltoall", "average_gradients", "broadcast",
    "broadcast_parameters", "reducescatter",
]  # fmt: skip

look_through(mlx.optimizers)
register_cast(
    mx.array, lambda array, dtype: array.astype(getattr(mx, dtype) if isinstance(dtype, str) else dtype)
)


@takes("allreduce", "op name compression prescale_factor postscale_factor process_set")
def allreduce(tree: Any, options: Options) -> Any:
    """Reduce all arrays of a tree over all ranks, in one operation; every rank gets the results.

    Example: ``loss = hvd.allreduce(loss)``.

    Args:
        {mlx_tree}
        {options}

    Returns:
        a new tree of the input's structure, shapes and dtypes, bit-identical on all ranks. Average and Sum
        without weights are differentiable; the gradient is the same reduction of all gradients.

    Raises:
        {mlx_errors}
    """
    return _trees.allreduce(tree, options)


@documented
def allgather(tree: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the arrays of all ranks along their first dimension, in rank order.

    Args:
        tree: a tree of arrays with at least one dimension. The first dimension may differ between ranks.
        {matching}

    Returns:
        a new tree, the same on all ranks.

    Raises:
        ShapeError: an array has no dimensions.
        {mlx_errors}
    """
    return _trees.allgather(tree, name, process_set)


@documented
def broadcast(
    tree: Any, root_rank: int = 0, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send the root's arrays to all ranks.

    Args:
        {mlx_tree}
        {root_rank}
        {matching}

    Returns:
        a new tree with the root's values.

    Raises:
        {mlx_errors}
    """
    return _trees.broadcast(tree, root_rank, name, process_set)


@takes("reducescatter", "op name process_set prescale_factor postscale_factor")
def reducescatter(tree: Any, options: Options) -> Any:
    """Reduce all arrays of a tree over all ranks; every rank gets its part of the rows.

    Rows are divided evenly. If r rows remain, the first r ranks get one row more.

    Args:
        tree: a tree of arrays with at least one dimension, of the same structure, shapes and dtypes on all
            ranks.
        {options}

    Returns:
        a new tree with this rank's rows.

    Raises:
        NotOfferedError: the op is Adasum.
        ShapeError: an array has no dimensions.
        {mlx_errors}
    """
    return _trees.reducescatter(tree, options)


@documented
def alltoall(
    x: mx.array, splits: Optional[Sequence[int]] = None, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Send rows of an array to every rank, and receive rows from every rank.

    Args:
        x: an array with at least one dimension.
        {splits}
        {matching}

    Returns:
        the received rows in rank order. With ``splits``, a pair: the received rows, and their number from
        each rank (int32).

    Raises:
        ConfigError: the splits do not match the rows or the ranks.
        ShapeError: the array has no dimensions.
        {mlx_errors}
    """
    return _trees.alltoall(x, splits, name, process_set)


def _leaves(tree: Any) -> Tuple[List[mx.array], Callable[[Sequence[Any]], Any]]:
    structure, leaves = take_apart(tree, lambda node: not isinstance(node, (dict, list, tuple, type(None))))
    return [_array(leaf) for leaf in leaves], partial(put_together, structure)


def _array(leaf: Any) -> mx.array:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return from_host(np.asarray(leaf))
    if not isinstance(leaf, (mx.array, int, float)):
        raise ConfigError(
            f"Collectives work on trees of MLX arrays and numbers, not on a {type(leaf).__name__}."
        )
    return leaf if isinstance(leaf, mx.array) else mx.array(leaf)


def _execute(operation: Operation, given: List[Any]) -> Sequence[mx.array]:
    if operation.kind == "allreduce" and operation.how.adds and not operation.has_weight:
        return _with_gradient(operation, given)
    if operation.keeps_shapes:
        return _overwritten(operation, given)
    inputs = [to_host(item) if isinstance(item, mx.array) else item for item in given]
    return [from_host(array) for array in Batch([operation]).run(inputs)]


def _with_gradient(operation: Operation, given: List[Any]) -> Sequence[mx.array]:
    forward = mx.custom_function(lambda *arrays: _overwritten(operation, arrays))
    name = operation.name and f"{operation.name}.gradient"

    @forward.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> List[mx.array]:
        del primals, outputs
        return _overwritten(operation._replace(name=name), cotangents)

    return forward(*given)


def _overwritten(operation: Operation, given: Sequence[Any]) -> List[mx.array]:
    """Execute an operation whose results have the shapes of its inputs; return new arrays."""
    arrays, weights = (given[:-1], given[-1:]) if operation.has_weight else (given, [])
    by_dtype: Dict[Any, List[int]] = {}
    for index, array in enumerate(arrays):
        by_dtype.setdefault(str(array.dtype), []).append(index)
    blocks = Blocks(arrays, list(by_dtype.values()))
    Batch([operation]).overwrite([*blocks.views(), *weights])
    return blocks.results()


_trees = TreeCollectives(_leaves, _execute, lambda weight: [weight])


# ---- arrays ----------------------------------------------------------------------------------


def to_host(array: mx.array) -> Array:
    """Compute an array, and return its memory as a NumPy array."""
    if array.dtype == mx.bfloat16:  # NumPy does not take it from MLX
        bits: Array = to_host(array.view(mx.uint16))
        return bits.view(dtype_named("bfloat16"))
    evaluate(mx.eval, [array])
    return np.asarray(array)


def from_host(array: Array) -> mx.array:
    """Return a new array with the elements of a NumPy array."""
    if array.dtype.name == "bfloat16":
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array, dtype=getattr(mx, array.dtype.name.replace("bool", "bool_")))


def evaluate(how: Any, arrays: Sequence[mx.array]) -> None:
    """Compute arrays by ``mx.eval`` or ``mx.async_eval``, except where MLX transforms a function."""
    try:
        how(*arrays)
    except (ValueError, RuntimeError) as problem:
        if "transformation" not in str(problem):
            raise
        raise NotOfferedError(
            "A collective cannot be part of a function that mx.compile or mx.vmap transforms: call it "
            "outside, between two compiled functions."
        ) from problem


class Blocks:
    """Copies of arrays in new memory, which collectives overwrite: a block for each of ``groups``."""

    def __init__(self, arrays: Sequence[mx.array], groups: Sequence[Sequence[int]]) -> None:
        self._arrays, self._groups = arrays, groups
        self._blocks = []
        for group in groups:
            flat = [arrays[index].reshape(-1) for index in group]
            # Of one array MLX makes no copy; the empty part makes it one of two.
            self._blocks.append(mx.concatenate([*flat, flat[0][:0]]))

    def start(self) -> None:
        """Compute all blocks in the background, in their order; not while MLX differentiates."""
        evaluate(mx.async_eval, self._blocks)

    def views(self, weight: Optional[float] = None) -> Iterator[Any]:
        """Yield NumPy arrays of the memory when they are computed, and ``weight`` after each group."""
        for place, group in enumerate(self._groups):
            yield from self._parts(to_host(self._blocks[place]), group)
            if weight is not None:
                yield weight

    def results(self) -> List[mx.array]:
        """Return the arrays in place of the given ones, in their order."""
        found: List[Any] = [None] * len(self._arrays)
        for block, group in zip(self._blocks, self._groups):
            for index, part in zip(group, self._parts(block, group)):
                found[index] = part
        return found

    def _parts(self, block: Any, group: Sequence[int]) -> Iterator[Any]:
        start = 0
        for index in group:
            array = self._arrays[index]
            yield block[start : start + array.size].reshape(array.shape)
            start += array.size


# ---- training --------------------------------------------------------------------------------


class _Reducer:
    """Reduce trees of gradients in buckets, the last layers' first, while MLX computes the others."""

    def __init__(self, how: Reduction) -> None:
        self.how = how
        self._state = CompressionState()

    def __call__(self, gradients: Any, weight: Optional[float] = None) -> Any:
        structure, arrays = take_apart(gradients, _is_array)
        if not arrays or not (self.how.active() or weight is not None):
            return gradients
        names = [name for name, leaf in tree_flatten(gradients) if _is_array(leaf)]
        how, sent, restore = self.how.prepared(arrays)
        plan = _planned(
            tuple((name, item.shape, str(item.dtype), item.nbytes) for name, item in zip(names, sent))
        )
        blocks, extra = Blocks(sent, [group for group, _ in plan]), weight is not None
        operations = [
            Operation("allreduce", how, label, len(group) + extra, has_weight=extra, state=self._state)
            for group, label in plan
        ]
        blocks.start()
        Batch(operations).overwrite(blocks.views(weight))
        return put_together(structure, restore(blocks.results()))


@lru_cache(maxsize=16)
def _planned(described: Tuple[Tuple[str, Tuple[int, ...], str, int], ...]) -> List[Tuple[List[int], str]]:
    """Return the buckets of gradients (by name, shape, dtype and size), and the names of their operations."""
    plan = plan_buckets([Gradient(nbytes, dtype) for _, _, dtype, nbytes in described])
    return [(group, bucket_name(*zip(*(described[index][:2] for index in group)))) for group in plan]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, mx.array)


@documented
def average_gradients(
    gradients: Any, op: ReduceOp = ReduceOp.AVERAGE, compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set, weight: Optional[float] = None,
) -> Any:  # fmt: skip
    """Average a tree of gradients over all ranks, as ``mlx.nn.average_gradients`` does.

    Example: ``optimizer.update(model, hvd.average_gradients(gradients))``.

    Args:
        gradients: a tree of arrays, of the same structure, shapes and dtypes on all ranks.
        op: the reduction: ``Average`` (the default), ``Sum`` or ``Adasum``.
        {compression}
        {process_set}
        {weight}

    Returns:
        a new tree of the same structure.

    Raises:
        ConfigError: the compression is ``"auto"``, which only an optimizer can use.
        {mlx_errors}
    """
    how = of_gradients(op, 1.0, process_set, compression)
    if isinstance(how.compression, AutoCompression):
        raise ConfigError(
            f"average_gradients() keeps nothing from step to step, as {how.compression.kind!r} needs: "
            "use DistributedOptimizer, or Compression.int8 or .bf16."
        )
    return _Reducer(how)(gradients, weight)


class _Distributed:
    """Mixin for optimizers: apply the average of the ranks' gradients."""

    _reducer: _Reducer

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Average trees of gradients over all ranks, and return the tree of the new parameters."""
        named = tree_flatten(parameters)
        check_start(
            self._reducer.how.process_set,
            f"{named[0][0] if named else ''} of {len(named)}",
            lambda: [to_host(leaf.reshape(-1)[:8]) for _, leaf in named],
        )
        return super().apply_gradients(self._reducer(gradients), parameters)  # type: ignore[misc]


@documented
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: mlx.optimizers.Optimizer, op: ReduceOp = ReduceOp.AVERAGE, compression: Any = Compression.none,
    gradient_predivide_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> mlx.optimizers.Optimizer:  # fmt: skip
    """Wrap an MLX optimizer: before each step it reduces the gradients over all ranks.

    Example: ``optimizer = hvd.DistributedOptimizer(optim.Adam(1e-3))``.

    Args:
        optimizer: any optimizer of ``mlx.optimizers``.
        op: the reduction: ``Average`` (the default), ``Sum`` or ``Adasum``.
        {gradient_compression}
        {tf_gradient_predivide_factor}
        {process_set}

    Returns:
        an optimizer with the state and the attributes of ``optimizer``, of a class derived from its class.

    Raises:
        ConfigError: ``optimizer`` is not an MLX optimizer or is already distributed, or
            ``gradient_predivide_factor`` is given with an op other than Average.
    """
    if not isinstance(optimizer, mlx.optimizers.Optimizer) or isinstance(optimizer, _Distributed):
        raise ConfigError(
            f"DistributedOptimizer takes an optimizer of mlx.optimizers, like Adam(1e-3), not a "
            f"{type(optimizer).__name__}."
        )
    made: Any = wrapped(_Distributed, optimizer)
    made._reducer = _Reducer(of_gradients(op, gradient_predivide_factor, process_set, compression))
    return made


@documented
def broadcast_parameters(tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Send the root's state to all ranks: a model's parameters, or an optimizer's state.

    Example: ``hvd.broadcast_parameters(model)``, and after a checkpoint was loaded
    ``optimizer.state = hvd.broadcast_parameters(optimizer.state)``.

    Args:
        tree: an ``mlx.nn.Module``, whose parameters are replaced. Or a tree of arrays with the same shapes
            and dtypes on all ranks, and of other objects, which are pickled.
        {root_rank}
        {process_set}

    Returns:
        the module itself, or a new tree with the root's values.

    Raises:
        {mlx_errors}
    """
    if isinstance(tree, Module):
        return tree.update(broadcast_parameters(tree.parameters(), root_rank, process_set))
    structure, arrays = take_apart(tree, _is_array)
    structure = broadcast_object(structure, root_rank, process_set=process_set)
    return put_together(structure, broadcast(arrays, root_rank, process_set=process_set))
