"""Gradient tapes whose gradients are those of all ranks."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import tensorflow as tf

from .._adapter.gradients import Groups
from .._tensorflow.compression import Compression
from .._tensorflow.gradients import GradientReducer
from ..errors import ConfigError
from ..ops import ReduceOp
from ..process_set import ProcessSet, global_process_set

_classes: Dict[Any, Any] = {}


class _Distributed:
    """What a distributed tape has besides what the user's own has."""

    _reducer: GradientReducer

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """Like the tape's own, then reduced over all ranks."""
        computed = super().gradient(target, sources, output_gradients, **options)  # type: ignore[misc]
        flat = tf.nest.flatten(sources)
        numbers = {id(source): index for index, source in enumerate(flat)}
        name = (lambda source: f"gradient{numbers[id(source)]:06d}") if use_generic_names else None
        reduced = self._reducer.reduce(tf.nest.flatten(computed), flat, "tape", name)
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable is not reduced: it belongs to a part only this rank has."""
        self._reducer.register_local(source)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> Tuple[List[Tuple[Any, Any]], List[Tuple[Any, Any]]]:
        """What :meth:`gradient` gives, as pairs of a source and its gradient.

        Returns:
            the pairs of local sources, and those of all others.
        """
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients, use_generic_names)))
        local = [pair for pair in pairs if self._reducer.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._reducer.is_local(pair[0])]


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
) -> Any:
    """A tape whose ``gradient()`` gives the gradients of all ranks together.

    ::

        with tf.GradientTape() as tape:
            loss = ...
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    Args:
        gradtape: what has recorded.
        compression: how gradients travel.
        sparse_as_dense: reduce ``tf.IndexedSlices`` as dense tensors.
        op: Average (the default), Sum or Adasum.
        gradient_predivide_factor: divide an average by so much before the sum, by the rest after it.
        num_groups, groups: reduce gradients in so many groups, or in these (lists of variables).
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local sources by the number of ranks.
        device_dense, device_sparse: without effect; Horovod has them.
    """
    kind: Any = type(gradtape)
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (_Distributed, kind), {"__doc__": kind.__doc__})
    tape: Any = _classes[kind].__new__(_classes[kind])
    # The same tape, so that what it has recorded is not lost.
    tape.__dict__.update(gradtape.__dict__)
    tape._reducer = GradientReducer(
        compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups, process_set,
        scale_local_gradients,
    )  # fmt: skip
    return tape


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
) -> Any:
    """Like :func:`DistributedGradientTape`, for models of which some layers are this rank's own.

    Args:
        local_layers: a layer or several, whose gradients are not reduced.

    Raises:
        ConfigError: one of them is no layer.
    """
    layers = local_layers if local_layers is not None else []
    listed = list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
    if not all(hasattr(layer, "trainable_weights") for layer in listed):
        raise ConfigError(f"local_layers must be layers of Keras, not {listed}.")
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
        num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for layer in listed:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
