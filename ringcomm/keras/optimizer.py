"""Keras optimizers whose gradients are those of all ranks, on every backend."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import keras

from .._adapter.arguments import predivided
from .._adapter.compression import Compression
from .._adapter.gradients import Groups, Reduction, chosen_groups
from ..collective.call_sites import look_through
from ..errors import BrokenInvariantError, ConfigError
from ..ops import ReduceOp, op_of
from ..process_set import ProcessSet, global_process_set
from .backends import reduce
from .reduction_options import How

look_through(keras)

_classes: Dict[type, type] = {}


class _Distributed:
    """What a distributed optimizer has besides what the user's own has.

    ``apply()`` is the one method that ``model.fit`` reaches on every backend; ``apply_gradients()`` is
    passed by on PyTorch and JAX, where a model would be trained without any reduction and without a word.
    """

    _ringcomm_how: How
    _ringcomm_scale_local: bool
    _ringcomm_local: Dict[int, Any]
    _ringcomm_variables: List[Any]
    _ringcomm_reached = False

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Like the optimizer's own, with the gradients of all ranks."""
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)  # type: ignore[attr-defined]
        own = super().apply  # type: ignore[misc]
        if self._accumulates():
            # The sum of several batches is reduced, not each batch: see _clip_gradients().
            present = [variable for gradient, variable in zip(grads, variables) if gradient is not None]
            object.__setattr__(self, "_ringcomm_variables", present)
            return own(grads, trainable_variables)
        return own(self._reduced(grads, variables), trainable_variables)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """What JAX calls; it comes to :meth:`apply`, but for optimizers that scale losses."""
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            grads = self._reduced(grads, self.inner_optimizer._trainable_variables)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]

    def _accumulates(self) -> bool:
        return bool(getattr(self, "gradient_accumulation_steps", None)) and hasattr(
            keras.optimizers.Optimizer, "_clip_gradients"
        )

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Where Keras comes with what has been accumulated."""
        if self._accumulates():
            grads = self._reduced(grads, self._ringcomm_variables)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
        object.__setattr__(self, "_ringcomm_reached", True)
        results = list(gradients)
        how = self._ringcomm_how.reduction
        if not how.process_set.included() or how.process_set.size() == 1:
            factor = how.prescale * how.postscale
            return results if factor == 1.0 else [item if item is None else item * factor for item in results]
        shared = []
        for index, variable in enumerate(variables):
            if results[index] is None:
                continue
            if id(variable) not in self._ringcomm_local:
                shared.append(index)
            elif self._ringcomm_scale_local:
                results[index] = results[index] / how.process_set.size()
        if shared:
            reduced = reduce(
                self._ringcomm_how,
                [results[index] for index in shared],
                [variables[index] for index in shared],
            )
            for index, gradient in zip(shared, reduced):
                results[index] = gradient
        return results

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable is not reduced: it belongs to a part only this rank has."""
        self._ringcomm_local[id(var)] = var


def distributed_class(kind: type) -> type:
    """The class of optimizers like these that reduce gradients. It has the same name.

    So what is saved with a model names Keras's own class, and can be loaded where ringcomm is not
    installed, by ``keras.models.load_model``; :func:`ringcomm.keras.load_model` wraps it again.
    """
    if issubclass(kind, _Distributed):
        return kind
    if kind not in _classes:
        exported = getattr(keras.optimizers, kind.__name__, None)
        # Where the class is for every backend: on PyTorch kind is one that only this backend has.
        public = isinstance(exported, type) and issubclass(kind, exported)
        module = "keras.optimizers" if public else kind.__module__
        _classes[kind] = type(
            kind.__name__, (_Distributed, kind), {"__doc__": kind.__doc__, "__module__": module}
        )
    return _classes[kind]


def check_reached(optimizer: Any) -> None:
    """Called after an epoch: whether Keras has taken the way on which gradients are reduced.

    Raises:
        BrokenInvariantError: it has not, and ranks would train models of their own from here on.
    """
    if isinstance(optimizer, _Distributed) and not optimizer._ringcomm_reached:
        raise BrokenInvariantError(
            f"Keras {keras.__version__} on {keras.backend.backend()} has trained with "
            f"{type(optimizer).__name__} without reducing gradients: ringcomm does not know this version."
        )


def make_distributed(
    optimizer: Any, how: How, passes: int = 1, scale_local: bool = True, in_place: bool = False
) -> Any:
    """A distributed optimizer with the configuration of another one, or that one itself, with its state."""
    kind = distributed_class(type(optimizer))
    if in_place:
        optimizer.__class__ = kind
        distributed: Any = optimizer
    else:
        config = optimizer.get_config()
        if passes > 1:
            if config.get("gradient_accumulation_steps"):
                raise ConfigError(
                    "backward_passes_per_step and gradient_accumulation_steps are the same: give one."
                )
            config["gradient_accumulation_steps"] = passes
        distributed = kind.from_config(config)  # type: ignore[attr-defined]
    _attach(distributed, how, scale_local)
    return distributed


def _attach(optimizer: Any, how: How, scale_local: bool) -> None:
    # Past Keras's bookkeeping, which would take what is set for something to save.
    object.__setattr__(optimizer, "_ringcomm_how", how)
    object.__setattr__(optimizer, "_ringcomm_scale_local", scale_local)
    object.__setattr__(optimizer, "_ringcomm_local", {})


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, name: Optional[str] = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
    num_groups: int = 0, groups: Groups = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:  # fmt: skip
    """An optimizer that averages gradients over all ranks before it applies them.

    ::

        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), ...)

    Args:
        optimizer: any of Keras 3, or of ``tf_keras``.
        compression: how gradients travel.
        sparse_as_dense: on TensorFlow, reduce ``tf.IndexedSlices`` as dense tensors (elsewhere all are).
        gradient_predivide_factor: divide an average by so much before the sum, by the rest after it.
        op: Average (the default), Sum or Adasum.
        backward_passes_per_step: add up the gradients of so many batches before they are reduced. Keras
            3 calls this ``gradient_accumulation_steps``. Sparse gradients need ``sparse_as_dense`` in
            ``tf_keras``.
        average_aggregated_gradients: divide what has been added up by the number of passes.
        num_groups, groups: on TensorFlow, reduce gradients in so many groups, or in these (lists of
            variables). Elsewhere all travel together.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        name, device_dense, device_sparse: without effect; Horovod has them.

    Raises:
        ConfigError: it is no optimizer of Keras, or the arguments make no sense.
    """
    if backward_passes_per_step < 1:
        raise ConfigError("backward_passes_per_step must be at least 1")
    if is_keras_2(optimizer):
        return _for_keras_2(
            optimizer, backward_passes_per_step, average_aggregated_gradients, compression, sparse_as_dense,
            op, gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients,
        )  # fmt: skip
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(f"DistributedOptimizer needs an optimizer of Keras, not {type(optimizer)}.")
    if _losses_are_scaled() and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # What compile() would do otherwise, the other way round: then each rank would decide by its own
        # gradients whether to make a step, and only some of them would come to the reduction.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    chosen = op_of(op)
    prescale, postscale = predivided(chosen, gradient_predivide_factor)
    if backward_passes_per_step > 1 and not average_aggregated_gradients:
        # Keras averages what it has accumulated.
        postscale *= backward_passes_per_step
    how = How(
        Reduction(chosen, prescale, postscale, process_set),
        compression,
        sparse_as_dense,
        chosen_groups(groups, num_groups, object),
    )
    return make_distributed(optimizer, how, backward_passes_per_step, scale_local_gradients)


def is_keras_2(thing: Any) -> bool:
    """Whether something is of ``tf_keras``, which need not be installed."""
    return any(kind.__module__.partition(".")[0] == "tf_keras" for kind in type(thing).__mro__)


def _for_keras_2(
    optimizer: Any, passes: int, average: bool, compression: Any, sparse_as_dense: bool, *how: Any
) -> Any:
    from .._tensorflow.accumulation import Accumulator
    from .._tensorflow.gradients import GradientReducer
    from .._tensorflow.legacy import make_distributed as make

    accumulator = Accumulator(passes, average, sparse_as_dense) if passes > 1 else None
    return make(optimizer, GradientReducer(compression, sparse_as_dense, *how), accumulator=accumulator)


def _losses_are_scaled() -> bool:
    return bool(keras.config.dtype_policy().name == "mixed_float16")


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """Like :func:`DistributedOptimizer`, for models of which some layers are this rank's own.

    Args:
        local_layers: a layer or several (built), whose gradients are not reduced.
    """
    distributed = DistributedOptimizer(optimizer, *args, **kwargs)
    layers = local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    for layer in layers:
        for variable in layer.trainable_weights if layer is not None else ():
            distributed.register_local_var(variable)
    return distributed
