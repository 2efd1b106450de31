"""Gradient tapes that reduce gradients over all ranks."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import tensorflow as tf

from .._adapter.compression import Compression
from .._adapter.reduction import Groups, of_gradients, register_layers, wrapped
from .._tensorflow.gradients import GradientReducer
from ..balance.pace import weight_of_steps
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from ..ops import ReduceOp, op_of


class _Distributed:
    """Mixin that adds the reduction to the class of the user's tape."""

    _reducer: GradientReducer

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """Compute gradients from what the tape has recorded and reduce them over all ranks.

        Args:
            target: the tensor, or nested structure of tensors, to differentiate.
            sources: the variables to differentiate with respect to: one or a nested structure.
            output_gradients: gradients with respect to ``target``, one per element.
            use_generic_names: match gradients between ranks by their place in ``sources`` and not by the
                names of the variables.
            options: further arguments of ``tf.GradientTape.gradient``.

        Returns:
            the reduced gradients, in the structure of ``sources``; None where there is no gradient.

        Raises:
            MismatchError: ranks differ in the variables, their shapes or dtypes.
            PeerLostError: a rank was lost.
        """
        computed = super().gradient(target, sources, output_gradients, **options)  # type: ignore[misc]
        flat = tf.nest.flatten(sources)
        numbers = {id(source): index for index, source in enumerate(flat)}
        name = (lambda source: f"gradient{numbers[id(source)]:06d}") if use_generic_names else None
        reduced = self._reducer.reduce(tf.nest.flatten(computed), flat, "tape", name)
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """Exclude a variable's gradient from the reduction: only this rank has the variable."""
        self._reducer.register_local(source)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> Tuple[List[Tuple[Any, Any]], List[Tuple[Any, Any]]]:
        """Return pairs (source, gradient): first those of local sources, then all others, reduced.

        Arguments as of :meth:`gradient`.
        """
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients, use_generic_names)))
        local = [pair for pair in pairs if self._reducer.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._reducer.is_local(pair[0])]


@documented
def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    batches: Any = None,
) -> Any:
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
        a tape with the recorded computation of ``gradtape`` and the methods of its class, and besides
        ``register_local_source(variable)``, which excludes a variable's gradient from the reduction.

    Raises:
        ConfigError: ``groups`` is neither a number nor lists of variables, or
            ``gradient_predivide_factor`` is given with an op other than Average.
    """
    # The same recorded computation, so that it is not lost.
    tape = wrapped(_Distributed, gradtape)
    how = of_gradients(
        op, gradient_predivide_factor, process_set, compression,
        weight_of_steps(batches, op_of(op), shared=True), sparse_as_dense, groups, num_groups,
    )  # fmt: skip
    tape._reducer = GradientReducer(how, scale_local_gradients)
    return tape


@documented
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    batches: Any = None,
) -> Any:
    """Wrap a gradient tape: gradients are reduced over all ranks, except those of some layers.

    Args:
        gradtape: the tape that has recorded the computation.
        {tf_gradients_options}
        local_layers: one layer or several (built), whose gradients are not reduced because every rank has
            its own weights of them.
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
