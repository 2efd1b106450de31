"""Training: gradient tapes, optimizers and batch normalization over all ranks, and balanced data."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, Optional, Sequence, Tuple

import tensorflow as tf

from .._adapter.compression import Compression
from .._adapter.gradients import variable_name
from .._adapter.reduction import Groups, Reduction, checked_passes, of_gradients, register_layers, wrapped
from ..balance.batches import BalancedBatches
from ..balance.pace import weight_of_steps
from ..calls.process_set import ProcessSet, global_process_set, size_of
from ..docstrings import documented
from ..errors import ConfigError
from ..ops import ReduceOp, op_of
from . import bridge
from .collectives import reduce
from .gradients import Accumulator, GradientReducer, ReducingOptimizer

__all__ = [
    "BalancedDataset", "DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape",
    "SyncBatchNormalization",
]  # fmt: skip

tf1 = tf.compat.v1

_KERAS_2 = tf.keras.Model.__module__.partition(".")[0] == "tf_keras"


class _Tape:
    """Mixin that adds the reduction to the class of the user's tape."""

    _reducer: GradientReducer

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Return the gradients as ``tf.GradientTape.gradient`` does, reduced over all ranks.
        ``use_generic_names``: match gradients between ranks by their place in ``sources`` and not by the
        names of the variables. MismatchError: ranks differ in the variables, their shapes or dtypes.
        """
        computed = super().gradient(target, sources, output_gradients, **options)  # type: ignore[misc]
        flat = tf.nest.flatten(sources)
        numbers = {id(source): index for index, source in enumerate(flat)}
        generic = lambda source: f"gradient{numbers[id(source)]:06d}"  # noqa: E731
        name = generic if use_generic_names else variable_name
        reduced = self._reducer.reduce(tf.nest.flatten(computed), flat, "tape", name)
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """Exclude a variable's gradient from the reduction: only this rank has the variable."""
        self._reducer.register_local(source)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> Tuple[List[Tuple[Any, Any]], List[Tuple[Any, Any]]]:  # fmt: skip
        """Return pairs (source, gradient): of local sources, and all others, reduced."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients, use_generic_names)))
        local = [pair for pair in pairs if self._reducer.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._reducer.is_local(pair[0])]


@documented
def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False, op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Groups = None,
    process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
    batches: Any = None,
) -> Any:  # fmt: skip
    """Wrap a gradient tape: the returned tape's ``gradient()`` reduces the gradients over all ranks.

    ::

        with tf.GradientTape() as tape:
            loss = ...
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    Args:
        gradtape: the tape that has recorded the computation.
        {tf_gradients_options}
        {tf_scale_local_gradients}
        {balanced_batches}

    Returns:
        a tape with the recorded computation of ``gradtape`` and the methods of its class. Its additional
        method ``register_local_source(variable)`` excludes a variable's gradient from the reduction.

    Raises:
        ConfigError: ``groups`` is neither a number nor lists of variables, or
            ``gradient_predivide_factor`` is given with an op other than Average.
    """
    # The same recorded computation, so that it is not lost.
    tape = wrapped(_Tape, gradtape)
    how = of_gradients(
        op, gradient_predivide_factor, process_set, compression,
        weight_of_steps(batches, op_of(op), shared=True), sparse_as_dense, groups, num_groups,
    )  # fmt: skip
    tape._reducer = GradientReducer(how, scale_local_gradients)
    return tape


@documented
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False, op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Groups = None,
    process_set: ProcessSet = global_process_set, local_layers: Any = None,
    scale_local_gradients: bool = True, batches: Any = None,
) -> Any:  # fmt: skip
    """Wrap a gradient tape: gradients are reduced over all ranks, except those of some layers.

    Args:
        gradtape: the tape that has recorded the computation.
        {tf_gradients_options}
        local_layers: one or several built layers. Every rank has its own weights of these layers, and their
            gradients are not reduced.
        {tf_scale_local_gradients}
        {balanced_batches}

    Returns:
        a tape with the recorded computation of ``gradtape`` and the methods of its class.

    Raises:
        ConfigError: an entry of ``local_layers`` is not a Keras layer, ``groups`` is neither a number nor
            lists of variables, or ``gradient_predivide_factor`` is given with an op other than Average.
    """
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
        num_groups, groups, process_set, scale_local_gradients, batches,
    )  # fmt: skip
    register_layers(local_layers, tape.register_local_source)
    return tape


class _Optimizer(ReducingOptimizer):
    """Mixin that adds the reduction to the class of the user's ``tf.compat.v1.train`` optimizer."""

    _sums: Optional[Callable[[], Accumulator]] = None  # makes those of a graph

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return pairs (gradient, variable) from the optimizer's method, reduced over all ranks. With
        ``backward_passes_per_step`` > 1 they are not reduced here but in :meth:`apply_gradients`.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        return pairs if self._sums is not None else self._reduced(pairs, "optimizer")

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: Optional[str] = None
    ) -> Any:
        """Return the operation that applies pairs (gradient, variable) and increments ``global_step``. With
        ``backward_passes_per_step`` > 1 it adds them up and applies every n-th sum.
        """
        own = super().apply_gradients  # type: ignore[misc]
        if self._sums is None:
            return own(grads_and_vars, global_step, name)
        apply = lambda pairs: own(self._reduced(pairs, "optimizer"), global_step, name)  # noqa: E731
        return self._sums().step(list(grads_and_vars), apply).op


@documented
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, name: Optional[str] = None, use_locking: bool = False, device_dense: str = "",
    device_sparse: str = "", compression: Any = Compression.none, sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1, op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0, average_aggregated_gradients: bool = False,
    num_groups: int = 0, groups: Groups = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True, batches: Any = None,
) -> Any:  # fmt: skip
    """Wrap an optimizer: it reduces gradients over all ranks before it applies them.

    ::

        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.001 * hvd.size()))
        train_step = optimizer.minimize(loss)

    Args:
        optimizer: an optimizer of ``tf.compat.v1.train`` or of Keras.
        name: name of the returned optimizer; None: the name of ``optimizer``.
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
        an optimizer of a class derived from the class of ``optimizer``. Its method
        ``register_local_var(variable)`` excludes a variable's gradient from the reduction.

    Raises:
        ConfigError: ``optimizer`` is not such an optimizer, ``backward_passes_per_step`` is less than 1,
            ``groups`` is neither a number nor lists of variables, or ``gradient_predivide_factor`` is given
            with an op other than Average.
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
    distributed = wrapped(_Optimizer, optimizer)
    how = of_gradients(
        op, gradient_predivide_factor, process_set, compression,
        weight_of_steps(batches, op_of(op), backward_passes_per_step), sparse_as_dense, groups, num_groups,
    )  # fmt: skip
    distributed._reducer = GradientReducer(how, scale_local_gradients)
    if backward_passes_per_step > 1:
        distributed._sums = partial(Accumulator, backward_passes_per_step, average_aggregated_gradients, True)
    distributed._optimizer = optimizer  # Horovod keeps the wrapped optimizer in this attribute
    if name is not None:
        distributed._name = name
    return distributed


@documented
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch normalization layer that computes mean and variance over the batches of all ranks.

    It works with Keras 3 on TensorFlow and with ``tf_keras``. Inputs have the shapes and dtypes that
    ``keras.layers.BatchNormalization`` accepts. Batch sizes may differ between ranks. A forward pass in
    training performs two allreduces.

    Args:
        fused: must be False; accepted because Horovod's class has it.
        {process_set}
        kwargs: arguments of ``keras.layers.BatchNormalization``, such as ``axis`` and ``momentum``.

    Raises:
        ValueError: ``fused`` is True or None.
    """

    def __init__(
        self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if _KERAS_2:
            kwargs["fused"] = False  # or images are normalized in one operation, without _moments()
        super().__init__(**kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, *details: Any, **named: Any) -> Any:
        """Return mean and variance. ``details``: the mask; in Keras 2 also axes and whether to keep them."""
        if size_of(self._process_set) == 1:
            return super()._moments(inputs, *details, **named)
        if not _KERAS_2:
            return self._common_moments(inputs, self._reduction_axes, *details, **named)
        return self._keras_2_moments(inputs, *details, **named)

    def _keras_2_moments(self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None) -> Any:
        moments = self._common_moments(inputs, reduction_axes, mask)
        shape = _lengths(inputs, reduction_axes)
        return [tf.reshape(moment, shape) for moment in moments] if keep_dims else moments

    def _common_moments(self, inputs: Any, axes: Any, mask: Any) -> Any:
        how = Reduction(ReduceOp.SUM, process_set=self._process_set)
        weights = tf.ones_like(inputs[..., :1]) if mask is None else tf.cast(mask, inputs.dtype)[..., None]
        weights = tf.broadcast_to(weights, tf.shape(inputs))
        name = bridge.name_of(None, "sync_batch_norm.mean", [inputs])
        sums = [tf.reduce_sum(item, axes) for item in (weights, inputs * weights)]
        count, total = reduce(how, name, sums)
        count = tf.stop_gradient(count)
        mean = tf.math.divide_no_nan(total, count)
        # Deviations from the common mean, in a second allreduce: a difference of large sums loses precision.
        deviations = tf.square(inputs - tf.reshape(mean, _lengths(inputs, axes))) * weights
        name = bridge.name_of(None, "sync_batch_norm.variance", [inputs])
        (squares,) = reduce(how, name, [tf.reduce_sum(deviations, axes)])
        return mean, tf.math.divide_no_nan(squares, count)


def _lengths(inputs: Any, reduced: Any) -> Any:
    """Return the shape in which moments broadcast against the inputs."""
    return [1 if axis in reduced else inputs.shape[axis] for axis in range(inputs.shape.rank)]


@documented
class BalancedDataset(BalancedBatches):
    """Tensors for a training loop: each rank gets as many rows as it can compute in time.

    Example::

        data = hvd.BalancedDataset(images, labels, global_batch=96)
        for epoch in range(epochs):
            for x, y in data:
                with tf.GradientTape() as tape:
                    loss = loss_of(model(x), y)  # the mean over the rows, as with one process
                tape = hvd.DistributedGradientTape(tape, batches=data)

    A rank whose share of a step is empty gets two rows of another rank, and its gradients have weight 0.

    Args:
        *arrays: arrays or tensors with equally many rows.
        global_batch: rows of all ranks together per step.
        seed: seed for the order of the rows, the same on all ranks.
        **options: ``speeds``, ``min_batch``, ``max_batch``, ``multiple_of``, ``shuffle`` and ``drop_last``,
            as for ``BalancedBatches``. A ``tf.function`` is traced again for every number of rows.
            ``multiple_of=8`` or ``reduce_retracing=True`` limits this.

    Raises:
        {balanced_errors}
    """

    def __init__(self, *arrays: Any, global_batch: int = 96, seed: int = 0, **options: Any) -> None:
        lengths = {len(array) for array in arrays}
        if len(lengths) != 1:
            raise ConfigError(f"BalancedDataset takes arrays of equally many rows, not {sorted(lengths)}.")
        super().__init__(lengths.pop(), global_batch, seed, **options)
        self._arrays = arrays

    def _item(self, epoch: int, step: int) -> Any:
        indices: List[int] = super()._item(epoch, step)
        rows = tuple(tf.gather(array, indices) for array in self._arrays)
        return rows if len(rows) > 1 else rows[0]
