"""Optimizers that reduce gradients over all ranks."""

from __future__ import annotations

from typing import Any, List, Optional

import tensorflow as tf

from .._adapter.compression import Compression
from .._adapter.reduction import Groups, checked_passes, of_gradients, wrapped
from .._tensorflow.gradients import GradientReducer, ReducingOptimizer
from ..balance.pace import weight_of_steps
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from ..ops import ReduceOp, op_of

tf1 = tf.compat.v1


class _Distributed(ReducingOptimizer):
    """Mixin that adds the reduction to the class of the user's ``tf.compat.v1.train`` optimizer."""

    _passes: int
    _factor: float

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return pairs (gradient, variable) from the optimizer's method, reduced over all ranks.

        With ``backward_passes_per_step`` > 1 they are not reduced here but in :meth:`apply_gradients`.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        if self._passes > 1:
            return pairs
        return self._reduced(pairs, "optimizer")

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: Optional[str] = None
    ) -> Any:
        """Return the operation that applies pairs (gradient, variable) and increments ``global_step``.

        With ``backward_passes_per_step`` > 1 it adds them up and applies every n-th sum.
        """
        pairs = list(grads_and_vars)
        own = super().apply_gradients  # type: ignore[misc]
        if self._passes == 1:
            return own(pairs, global_step, name)
        return _Accumulator(pairs, self._passes, self._factor).then(
            lambda sums: own(self._reduced(sums, "optimizer"), global_step, name)
        )


class _Accumulator:
    """Sum gradients over several runs of a graph."""

    def __init__(self, pairs: List[Any], passes: int, factor: float) -> None:
        self._passes = passes
        self._factor = factor
        self._pairs = [(tf.convert_to_tensor(g), v) for g, v in pairs if g is not None]
        with tf1.variable_scope(None, default_name="ringcomm_accumulated"):  # of this optimizer alone
            self._sums = [
                tf1.get_variable(
                    f"gradient_{index}", gradient.shape, gradient.dtype, tf1.zeros_initializer(),
                    trainable=False, use_resource=True, collections=[tf1.GraphKeys.LOCAL_VARIABLES],
                )
                for index, (gradient, _) in enumerate(self._pairs)
            ]  # fmt: skip
            self._count = tf1.get_variable(
                "passes", [], tf.int32, tf1.zeros_initializer(), trainable=False, use_resource=True,
                collections=[tf1.GraphKeys.LOCAL_VARIABLES],
            )  # fmt: skip

    def then(self, step: Any) -> Any:
        """Return an operation that adds the gradients, and calls ``step`` with complete sums."""
        added = [
            total.assign_add(gradient, read_value=False)
            for total, (gradient, _) in zip(self._sums, self._pairs)
        ]
        with tf.control_dependencies(added):
            count = self._count.assign_add(1)

        def make_step() -> Any:
            sums = [total.read_value() * tf.cast(self._factor, total.dtype) for total in self._sums]
            done = step([(total, variable) for total, (_, variable) in zip(sums, self._pairs)])
            with tf.control_dependencies([done]):
                cleared = [total.assign(tf.zeros_like(total), read_value=False) for total in self._sums]
                with tf.control_dependencies([*cleared, self._count.assign(0, read_value=False)]):
                    return tf.constant(True)

        return tf1.cond(tf.equal(count, self._passes), make_step, lambda: tf.constant(False)).op


@documented
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: Optional[str] = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    batches: Any = None,
) -> Any:
    """Wrap an optimizer: it reduces gradients over all ranks before it applies them.

    ::

        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.001 * hvd.size()))
        train_step = optimizer.minimize(loss)

    Args:
        optimizer: an optimizer of ``tf.compat.v1.train`` or of Keras.
        name: of the returned optimizer; None: that of ``optimizer``.
        use_locking: no effect; accepted because Horovod's function has it.
        {tf_device_dense}
        {tf_device_sparse}
        {gradient_compression}
        {tf_sparse_as_dense}
        {tf_backward_passes_per_step}
        {tf_gradient_op}
        {tf_gradient_predivide_factor}
        {tf_average_aggregated_gradients}
        {tf_num_groups}
        {tf_groups}
        {process_set}
        {tf_scale_local_gradients}
        {balanced_batches}

    Returns:
        an optimizer of a class derived from that of ``optimizer``. Its ``register_local_var(variable)``
        excludes a variable's gradient from the reduction.

    Raises:
        ConfigError: ``optimizer`` is of another kind, ``backward_passes_per_step`` is less than 1, ``groups``
            is neither a number nor lists of variables, or ``gradient_predivide_factor`` is given with an op
            other than Average.
    """
    checked_passes(backward_passes_per_step)
    if not isinstance(optimizer, tf1.train.Optimizer):
        # Imported here: Keras need not be installed.
        from ..keras.optimizer import DistributedOptimizer as for_keras

        return for_keras(
            optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
            gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients, num_groups,
            groups, process_set, scale_local_gradients, batches,
        )  # fmt: skip
    distributed = wrapped(_Distributed, optimizer)
    how = of_gradients(
        op, gradient_predivide_factor, process_set, compression,
        weight_of_steps(batches, op_of(op), backward_passes_per_step), sparse_as_dense, groups, num_groups,
    )  # fmt: skip
    distributed._reducer = GradientReducer(how, scale_local_gradients)
    distributed._passes = backward_passes_per_step
    distributed._factor = 1.0 / backward_passes_per_step if average_aggregated_gradients else 1.0
    distributed._optimizer = optimizer  # Horovod keeps the wrapped optimizer in this attribute
    if name is not None:
        distributed._name = name
    return distributed
