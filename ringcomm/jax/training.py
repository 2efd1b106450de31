"""Training: gradients reduced in buckets, functions with the reduction built in, and the optax optimizer."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Union

import jax
import jax.numpy as jnp

from .._adapter.compression import Compression, configured, refuse_local_steps
from .._adapter.gradients import Gradient, plan_buckets
from .._adapter.graph_callbacks import CompressionState, Operation
from .._adapter.reduction import Reduction, checked_passes, is_coded, predivided
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from ..errors import ConfigError
from ..ops import ReduceOp, op_of
from .programs import bind, weights_of

__all__ = ["AccumulationState", "DistributedOptimizer", "distributed", "grad", "value_and_grad"]


class GradientReducer(NamedTuple):
    """Reduce a tree of gradients."""

    how: Reduction  # for ``Compression.none`` the settings decide
    state: CompressionState  # kept from step to step by a compression with codes
    name: Optional[str] = None

    def __call__(self, gradients: Any, weight: Any = None) -> Any:
        """Return the reduced gradients, as a tree of the same structure, in which None stays None."""
        weights = weights_of(weight)
        leaves, structure = jax.tree_util.tree_flatten(gradients)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        if not arrays:
            return gradients
        refuse_local_steps()
        compression = configured(self.how.compression, self.how.process_set)
        how, sent, restore = self.how._replace(compression=compression, groups=None).prepared(arrays)
        buckets, name, state = self._buckets(sent), self.name, None
        if is_coded(how.compression):
            buckets, name, state = [list(range(len(sent)))], self.name or "jax.gradients", self.state
        results: List[Any] = [None] * len(arrays)
        for bucket in buckets:
            inputs = [*(sent[index] for index in bucket), *weights]
            operation = Operation("allreduce", how, name, len(inputs), has_weight=bool(weights), state=state)
            for index, reduced in zip(bucket, bind(operation, inputs)):
                results[index] = reduced
        return jax.tree_util.tree_unflatten(structure, restore(results))

    def _buckets(self, arrays: List[Any]) -> List[List[int]]:
        if self.how.weight is not None:
            return [list(range(len(arrays)))]  # a weight counts reductions as steps
        return plan_buckets([Gradient(it.size * it.dtype.itemsize, str(it.dtype)) for it in arrays])


def gradient_reducer(
    op: Any, compression: Any, gradient_predivide_factor: float, process_set: ProcessSet, share: float = 1.0
) -> GradientReducer:
    """Return a reducer for the arguments of the public functions; ``share`` multiplies its results."""
    chosen = op_of(op)
    prescale, postscale = predivided(chosen, gradient_predivide_factor)
    how = Reduction(chosen, prescale, postscale * share, process_set, compression=compression)
    return GradientReducer(how, CompressionState())


@documented
def value_and_grad(
    fun: Callable[..., Any], argnums: Union[int, Sequence[int]] = 0, has_aux: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE, compression: Any = Compression.none,
    gradient_predivide_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    weight: Optional[Callable[..., Any]] = None, **options: Any,
) -> Callable[..., Any]:  # fmt: skip
    """``jax.value_and_grad`` with gradients that are reduced over all ranks. The value is this rank's own.

    Example::

        loss, gradients = hvd.value_and_grad(loss_of)(params, batch)

    Args:
        fun: a function that returns a scalar, as for ``jax.value_and_grad``.
        argnums: the arguments to differentiate by.
        has_aux: whether ``fun`` returns a pair of the scalar and other results.
        op: the reduction: ``Average`` (the default), ``Sum`` or ``Adasum``.
        {gradient_compression}
        {tf_gradient_predivide_factor}
        {process_set}
        weight: a function of the arguments of ``fun``, such as ``lambda params, batch: batch.mask.sum()``.
            With ``Average``, the gradients are then the sum of ``weight * gradient`` over all ranks, divided
            by the sum of the weights. Gradients of a rank with weight 0 are ignored. None: the plain average.
        options: further keyword arguments of ``jax.value_and_grad``.

    Returns:
        a function with the arguments of ``fun`` and the results of ``jax.value_and_grad(fun)``.

    Raises:
        ConfigError: ``gradient_predivide_factor`` is given with an op other than Average.
    """
    reduce = gradient_reducer(op, compression, gradient_predivide_factor, process_set)
    own = jax.value_and_grad(fun, argnums, has_aux, **options)

    def of_all_ranks(*args: Any, **kwargs: Any) -> Any:
        value, gradients = own(*args, **kwargs)
        return value, reduce(gradients, None if weight is None else weight(*args, **kwargs))

    return of_all_ranks


@documented
def grad(
    fun: Callable[..., Any], argnums: Union[int, Sequence[int]] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """``jax.grad`` with gradients that are reduced over all ranks.

    Args:
        fun: a function that returns a scalar, as for ``jax.grad``.
        argnums: the arguments to differentiate by.
        has_aux: whether ``fun`` returns a pair of the scalar and other results.
        options: ``op``, ``compression``, ``gradient_predivide_factor``, ``process_set`` and ``weight`` as for
            ``value_and_grad()``, and further keyword arguments of ``jax.grad``.

    Returns:
        a function with the arguments of ``fun``. It returns the gradients; with ``has_aux`` a pair of the
        gradients and the other results.

    Raises:
        ConfigError: ``gradient_predivide_factor`` is given with an op other than Average.
    """
    both = value_and_grad(fun, argnums, has_aux, **options)

    def of_all_ranks(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return of_all_ranks


class AccumulationState(NamedTuple):
    """The state of an optimizer with ``backward_passes_per_step`` above 1.

    Attributes:
        inner: the state of the wrapped optimizer.
        passes: number of gradients in the sums.
        sums: sums of this rank's gradients since the last step.
    """

    inner: Any
    passes: Any
    sums: Any


@documented
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, op: ReduceOp = ReduceOp.AVERAGE, compression: Any = Compression.none,
    backward_passes_per_step: int = 1, gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set, average_aggregated_gradients: bool = False,
) -> Any:  # fmt: skip
    """Wrap an optax optimizer: its ``update`` first reduces the gradients over all ranks.

    Example: ``tx = hvd.DistributedOptimizer(optax.adam(1e-3 * hvd.size()))``.

    If ranks have unequal numbers of samples, call ``tx.update(gradients, state, params, weight=samples)``. It
    uses the sum of ``weight * gradient`` over all ranks, divided by the sum of the weights. Gradients of a
    rank with weight 0 are ignored. Either all ranks pass a weight or none.

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
        an ``optax.GradientTransformationExtraArgs``. Its state is the state of the wrapped optimizer, or with
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
