"""``DistributedOptimizer`` for optax: it reduces gradients over all ranks before it transforms them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._adapter.compression import Compression
from .._adapter.reduction import checked_passes
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from ..errors import ConfigError
from ..ops import ReduceOp
from .gradients import gradient_reducer


class AccumulationState(NamedTuple):
    """The state of an optimizer with ``backward_passes_per_step`` above 1.

    Attributes:
        inner: the wrapped optimizer's own state.
        passes: how many gradients the sums contain.
        sums: of this rank's gradients since the last step.
    """

    inner: Any
    passes: Any
    sums: Any


@documented
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Wrap an optax optimizer: its ``update`` first reduces the gradients over all ranks.

    Example: ``tx = hvd.DistributedOptimizer(optax.adam(1e-3 * hvd.size()))``.

    Ranks with unequal numbers of samples pass theirs: ``tx.update(gradients, state, params, weight=samples)``
    takes the sum of ``weight * gradient`` over all ranks, divided by the sum of their weights. What a rank of
    weight 0 passes is ignored. Either all ranks pass a weight or none.

    Args:
        optimizer: an ``optax.GradientTransformation``.
        op: the reduction: ``Average`` (the default), ``Sum`` or ``Adasum``.
        {gradient_compression}
        backward_passes_per_step: number of updates whose gradients are summed on this rank before one
            reduction and one step. The updates in between are zeros.
        {tf_gradient_predivide_factor}
        {process_set}
        average_aggregated_gradients: divide the sums by ``backward_passes_per_step``.

    Returns:
        an ``optax.GradientTransformationExtraArgs``. Its state is the wrapped optimizer's own; with
        ``backward_passes_per_step`` above 1 an ``AccumulationState``.

    Raises:
        ConfigError: ``optimizer`` is not an optax optimizer, ``backward_passes_per_step`` is less than 1, or
            ``gradient_predivide_factor`` is given with an op other than Average.
    """
    import optax

    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ConfigError(f"DistributedOptimizer requires an optax optimizer, not {type(optimizer)}.")
    checked_passes(backward_passes_per_step)
    share = 1.0 / backward_passes_per_step if average_aggregated_gradients else 1.0
    reduce = gradient_reducer(op, compression, gradient_predivide_factor, process_set, share)
    inner = optax.with_extra_args_support(optimizer)
    if backward_passes_per_step > 1:
        return _accumulating(optax, inner, reduce, backward_passes_per_step)

    def update(updates: Any, state: Any, params: Any = None, weight: Any = None, **extra: Any) -> Any:
        return inner.update(reduce(updates, weight), state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _accumulating(optax: Any, inner: Any, reduce: Any, passes: int) -> Any:
    def init(params: Any) -> AccumulationState:
        return AccumulationState(inner.init(params), jnp.zeros((), jnp.int32), _zeros(params))

    def update(
        updates: Any, state: AccumulationState, params: Any = None, weight: Any = None, **extra: Any
    ) -> Any:
        if weight is not None:
            raise ConfigError("update(weight=) requires backward_passes_per_step=1.")
        count = state.passes + 1
        sums = jax.tree_util.tree_map(jnp.add, state.sums, updates)

        def step() -> Any:
            changes, after = inner.update(reduce(sums), state.inner, params, **extra)
            return changes, AccumulationState(after, jnp.zeros_like(count), _zeros(sums))

        def wait() -> Any:
            changes, _ = jax.eval_shape(step)
            return _zeros(changes), AccumulationState(state.inner, count, sums)

        # The count is the same on all ranks, so all of them take the same branch.
        return jax.lax.cond(count == passes, step, wait)

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: jnp.zeros(jnp.shape(leaf), leaf.dtype), tree)


distributed = DistributedOptimizer
"""Another name for :func:`DistributedOptimizer`, in the style of optax."""
