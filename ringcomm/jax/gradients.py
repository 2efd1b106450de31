"""Reduces trees of gradients in buckets, and differentiates functions with the reduction built in."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Union

import jax
import jax.numpy as jnp

from .._adapter.arguments import predivided
from .._adapter.choice import configured
from .._adapter.compressed import CompressedAllreduce, CompressionState, is_coded
from .._adapter.gradients import Gradient, Reduction, plan_buckets
from .._adapter.graph_callbacks import Allreduce
from ..docstrings import documented
from ..ops import ReduceOp, op_of
from ..process_set import ProcessSet, global_process_set
from .compression import Compression
from .primitive import bind, weights_of


class GradientReducer(NamedTuple):
    """Reduces a tree of gradients.

    Attributes:
        how: op, factors and process set.
        compression: a compressor, its name, or what the settings say for ``Compression.none``.
        state: what a compression by codes keeps from step to step.
        name: of the operations, or None.
    """

    how: Reduction
    compression: Any
    state: CompressionState
    name: Optional[str] = None

    def __call__(self, gradients: Any, weight: Any = None) -> Any:
        """The reduced gradients, as a tree of the same structure. None stands for no gradient.

        Args:
            gradients: a tree.
            weight: of this rank's gradients in a weighted average; None: there are none.
        """
        weights = weights_of(weight)
        leaves, structure = jax.tree_util.tree_flatten(gradients)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        if not arrays:
            return gradients
        compression = configured(self.compression, self.how.process_set)
        if is_coded(compression):
            coded = CompressedAllreduce(
                self.how, self.name or "jax.gradients", len(arrays) + len(weights), compression, self.state,
                bool(weights),
            )  # fmt: skip
            return jax.tree_util.tree_unflatten(structure, bind(coded, [*arrays, *weights]))
        pairs = [compression.compress(array) for array in arrays]
        results: List[Any] = [None] * len(arrays)
        for bucket in self._buckets([item for item, _ in pairs]):
            operation = Allreduce(self.how, self.name, len(bucket) + len(weights), bool(weights))
            given = [*(pairs[index][0] for index in bucket), *weights]
            for index, reduced in zip(bucket, bind(operation, given)):
                results[index] = compression.decompress(reduced, pairs[index][1])
        return jax.tree_util.tree_unflatten(structure, results)

    def _buckets(self, arrays: List[Any]) -> List[List[int]]:
        if self.how.weight is not None:
            return [list(range(len(arrays)))]  # a weight counts reductions as steps
        return plan_buckets([_described(array) for array in arrays])


def _described(array: Any) -> Gradient:
    return Gradient(array.size * array.dtype.itemsize, str(array.dtype))


def gradient_reducer(
    op: Any, compression: Any, gradient_predivide_factor: float, process_set: ProcessSet, share: float = 1.0
) -> GradientReducer:
    """A reducer for the arguments of the public functions.

    Args:
        op: the reduction.
        compression: a compressor or its name.
        gradient_predivide_factor: divides an average in two steps.
        process_set: the ranks that take part.
        share: is multiplied to the results.

    Raises:
        ConfigError: the factor is given with an op other than Average.
    """
    chosen = op_of(op)
    prescale, postscale = predivided(chosen, gradient_predivide_factor)
    how = Reduction(chosen, prescale, postscale * share, process_set)
    return GradientReducer(how, compression, CompressionState())


@documented
def value_and_grad(
    fun: Callable[..., Any],
    argnums: Union[int, Sequence[int]] = 0,
    has_aux: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    compression: Any = Compression.none,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: Optional[Callable[..., Any]] = None,
    **options: Any,
) -> Callable[..., Any]:
    """``jax.value_and_grad`` whose gradients are reduced over all ranks. The value stays this rank's own.

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
            With ``Average`` the gradients are the sum of ``weight * gradient`` over all ranks, divided by the
            sum of their weights; what a rank of weight 0 computes is ignored. None: the plain average.
        options: further arguments of ``jax.value_and_grad``, by keyword.

    Returns:
        a function with the arguments of ``fun`` that returns what ``jax.value_and_grad(fun)`` does.

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
    """``jax.grad`` whose gradients are reduced over all ranks.

    Args:
        fun: a function that returns a scalar, as for ``jax.grad``.
        argnums: the arguments to differentiate by.
        has_aux: whether ``fun`` returns a pair of the scalar and other results.
        options: ``op``, ``compression``, ``gradient_predivide_factor``, ``process_set`` and ``weight`` as for
            ``value_and_grad()``, and further arguments of ``jax.grad``, by keyword.

    Returns:
        a function with the arguments of ``fun`` that returns the gradients, or a pair of them and the other
        results.

    Raises:
        ConfigError: ``gradient_predivide_factor`` is given with an op other than Average.
    """
    both = value_and_grad(fun, argnums, has_aux, **options)

    def of_all_ranks(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return of_all_ranks
