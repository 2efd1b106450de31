"""Gradients, parameters and optimizers of MLX on all ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, List, Optional, Tuple

import mlx.core as mx
import mlx.optimizers
from mlx.nn import Module
from mlx.utils import tree_flatten

from .._adapter.compression import AutoCompression, Compression
from .._adapter.gradients import Gradient, bucket_name, check_start, plan_buckets
from .._adapter.graph_callbacks import Batch, CompressionState, Operation, put_together, take_apart
from .._adapter.objects import broadcast_object
from .._adapter.reduction import Reduction, of_gradients, wrapped
from ..calls.process_set import ProcessSet, global_process_set
from ..collective.observe import look_through
from ..docstrings import documented
from ..errors import ConfigError
from ..ops import ReduceOp
from .collectives import Blocks, broadcast, to_host

look_through(mlx.optimizers)


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
    gradients: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
    weight: Optional[float] = None,
) -> Any:
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
        ConfigError: the compression is ``"auto"``, which needs what it keeps from step to step.
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
    optimizer: mlx.optimizers.Optimizer,
    op: ReduceOp = ReduceOp.AVERAGE,
    compression: Any = Compression.none,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> mlx.optimizers.Optimizer:
    """Wrap an MLX optimizer: it first reduces the gradients over all ranks.

    Example: ``optimizer = hvd.DistributedOptimizer(optim.Adam(1e-3))``.

    Args:
        optimizer: any optimizer of ``mlx.optimizers``.
        op: the reduction: ``Average`` (the default), ``Sum`` or ``Adasum``.
        {gradient_compression}
        {tf_gradient_predivide_factor}
        {process_set}

    Returns:
        an optimizer with the state and the attributes of the other one, of a class derived from its class.

    Raises:
        ConfigError: it is not an MLX optimizer, or is distributed already, or ``gradient_predivide_factor``
            is given with an op other than Average.
    """
    if not isinstance(optimizer, mlx.optimizers.Optimizer) or isinstance(optimizer, _Distributed):
        raise ConfigError(
            f"DistributedOptimizer takes an optimizer of mlx.optimizers, like Adam(1e-3), not a "
            f"{type(optimizer).__name__}."
        )
    made: Any = wrapped(_Distributed, optimizer)
    made._reducer = _Reducer(of_gradients(op, gradient_predivide_factor, process_set, compression))
    distributed: mlx.optimizers.Optimizer = made
    return distributed


@documented
def broadcast_parameters(tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Send the root's state to all ranks: a model's parameters, or an optimizer's state.

    Example: ``hvd.broadcast_parameters(model)``, and after a checkpoint was loaded
    ``optimizer.state = hvd.broadcast_parameters(optimizer.state)``.

    Args:
        tree: an ``mlx.nn.Module``, whose parameters are replaced; or a tree of arrays of the same shapes and
            dtypes on all ranks, and of other objects, which are pickled.
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
