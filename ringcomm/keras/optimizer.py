"""Keras optimizers that reduce gradients over all ranks, on every backend, and loading models with them."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Type

import keras

from .._adapter.compression import Compression
from .._adapter.gradients import group_name
from .._adapter.graph_callbacks import drop_residuals, state_of
from .._adapter.reduction import (
    Groups,
    OptionsInClass,
    Reduction,
    VariableReducer,
    checked_passes,
    convert,
    derive,
    of_gradients,
    register_layers,
    set_untracked,
)
from ..balance.pace import StepCursor, weight_of_steps
from ..calls.process_set import ProcessSet, global_process_set
from ..collective.observe import look_through
from ..docstrings import documented
from ..errors import BrokenInvariantError, ConfigError
from ..ops import ReduceOp, op_of

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "load_model"]

look_through(keras)


class _Distributed(OptionsInClass):
    """Mixin that adds the reduction to the class of the user's optimizer. ``model.fit`` calls ``apply()`` on
    every backend. It does not call ``apply_gradients()`` on PyTorch and JAX: a reduction there would silently
    be skipped.
    """

    _ringcomm_reducer: VariableReducer
    _ringcomm_variables: List[Any]
    _ringcomm_reached = False

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Reduce gradients over all ranks, then apply them with the optimizer's own method."""
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)  # type: ignore[attr-defined]
        own = super().apply  # type: ignore[misc]
        if self._accumulates():
            # The sum of several batches is reduced, not each batch: see _clip_gradients().
            present = [variable for gradient, variable in zip(grads, variables) if gradient is not None]
            set_untracked(self, "_ringcomm_variables", present)
            return own(grads, trainable_variables)
        return own(self._reduced(grads, variables), trainable_variables)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """Call :meth:`apply` for JAX, except in optimizers that scale losses."""
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            grads = self._reduced(grads, self.inner_optimizer._trainable_variables)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]

    def _take_options(self, how: Reduction, scale_local: bool) -> None:
        set_untracked(self, "_ringcomm_reducer", reducer_class()(how, scale_local))

    def _accumulates(self) -> bool:
        return bool(getattr(self, "gradient_accumulation_steps", None)) and hasattr(
            keras.optimizers.Optimizer, "_clip_gradients"
        )

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Reduce the accumulated gradients, with which Keras calls this."""
        if self._accumulates():
            grads = self._reduced(grads, self._ringcomm_variables)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
        set_untracked(self, "_ringcomm_reached", True)
        return self._ringcomm_reducer.reduce(gradients, variables, "keras")

    def load_own_variables(self, store: Any) -> None:
        """Load the optimizer's state; drop the residuals of error feedback, with one line in the log."""
        super().load_own_variables(store)  # type: ignore[misc]
        drop_residuals(self._trainable_variables, "a state was loaded")  # type: ignore[attr-defined]

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable's gradient from the reduction: only this rank has the variable."""
        self._ringcomm_reducer.register_local(var)


def distributed_class(kind: type, how: Reduction, scale_local: bool) -> Any:
    """Return a subclass of an optimizer's class that reduces gradients; it has the same name. A saved model
    therefore names Keras's own class: ``keras.models.load_model`` can load it where ringcomm is not
    installed, and :func:`ringcomm.keras.load_model` makes the optimizer distributed again.
    """
    made = derive((kind,) if issubclass(kind, _Distributed) else (_Distributed, kind), (how, scale_local))
    exported = getattr(keras.optimizers, kind.__name__, None)
    # The public class if there is one: on PyTorch, kind is a subclass that only this backend has.
    if isinstance(exported, type) and issubclass(kind, exported):
        made.__module__ = "keras.optimizers"
    return made


def reducer_class() -> Type[VariableReducer]:
    """Return the backend's reducer, which submits all gradients before it waits for any."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from ..tensorflow.gradients import GradientReducer

        return GradientReducer
    if backend == "torch":
        from ..torch.reducer import KerasReducer

        return KerasReducer
    if backend == "jax":
        return _JaxReducer
    raise NotImplementedError(
        f"The backend of Keras is {backend}; gradients can be reduced on tensorflow, torch and jax."
    )


class _JaxReducer(VariableReducer):
    """Reduce gradients that are JAX arrays; JAX runs collectives in program order."""

    def reduce_shared(
        self, gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any],
        scope: str = "gradients", *args: Any,
    ) -> List[Any]:  # fmt: skip
        """Reduce gradients of variables that all ranks have."""
        from ..jax.training import GradientReducer

        name, state = group_name(variables, scope, absent), state_of([*variables, *absent][0])
        return GradientReducer(self.how, state, name)(list(gradients))


def check_not_scaled_outside(optimizer: Any) -> None:
    """Check, before training, that the optimizer is not distributed within one that scales losses. Custom
    training loops are not checked: Keras does not tell an optimizer that another one wraps it.
    """
    if isinstance(getattr(optimizer, "inner_optimizer", None), _Distributed):
        raise ConfigError(
            "LossScaleOptimizer must not wrap the DistributedOptimizer, or ranks would not leave out the "
            "same steps. Write it the other way round: "
            "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), also where "
            "Model.compile() scales losses because of the model's policy."
        )


def check_reached(optimizer: Any) -> None:
    """Check after an epoch that Keras has called the method that reduces gradients."""
    if isinstance(optimizer, _Distributed) and not optimizer._ringcomm_reached:
        raise BrokenInvariantError(
            f"Keras {keras.__version__} on {keras.backend.backend()} has trained with "
            f"{type(optimizer).__name__} without reducing gradients: ringcomm does not support this version."
        )


def samples_of(model: Any) -> Optional[int]:
    """Return this rank's number of trained samples in this epoch; None: its data are not balanced."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, _Distributed):
        return None
    weight = optimizer._ringcomm_reducer.how.weight
    return weight.samples if isinstance(weight, StepCursor) else None


def make_distributed(
    optimizer: Any, how: Reduction, passes: int = 1, scale_local: bool = True, in_place: bool = False
) -> Any:
    """Create a distributed optimizer like another one, or (``in_place``) make it one, with its state."""
    kind = distributed_class(type(optimizer), how, scale_local)
    if in_place:
        return convert(optimizer, kind)
    config = optimizer.get_config()
    if passes > 1:
        if config.get("gradient_accumulation_steps"):
            raise ConfigError(
                "backward_passes_per_step and gradient_accumulation_steps mean the same: pass only one."
            )
        scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)  # it accumulates nothing itself
        options = config["inner_optimizer"]["config"] if scaled else config
        options["gradient_accumulation_steps"] = passes
    return kind.from_config(config)


@documented
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, name: Optional[str] = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0, op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
    num_groups: int = 0, groups: Groups = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True, batches: Any = None,
) -> Any:  # fmt: skip
    """Wrap a Keras optimizer: it reduces gradients over all ranks before it applies them.

    ::

        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), ...)

    Args:
        optimizer: an optimizer of Keras 3 or of ``tf_keras``.
        name: no effect; accepted because Horovod's function has it.
        {tf_device_dense}
        {tf_device_sparse}
        {gradient_compression}
        sparse_as_dense: on TensorFlow, convert ``tf.IndexedSlices`` to dense tensors before they are reduced.
            On other backends all gradients are dense.
        {tf_gradient_predivide_factor}
        {tf_gradient_op}
        backward_passes_per_step: number of batches whose gradients are summed on this rank before one
            reduction and one step. Keras 3 calls it ``gradient_accumulation_steps``. With ``tf_keras``,
            sparse gradients then need ``sparse_as_dense``.
        {tf_average_aggregated_gradients}
        num_groups: on TensorFlow, split the gradients into this number of groups, each reduced as one
            operation; 0: one group. On other backends there is always one group.
        groups: on TensorFlow, the number of groups, or a list of lists of variables that are reduced
            together.
        {process_set}
        {tf_scale_local_gradients}
        {balanced_batches}

    Returns:
        a new optimizer with the configuration of ``optimizer``, of a class derived from its class. Its method
        ``register_local_var(variable)`` excludes a variable's gradient from the reduction.

    Raises:
        ConfigError: ``optimizer`` is not a Keras optimizer, ``backward_passes_per_step`` is less than 1,
            ``groups`` is neither a number nor lists of variables, or ``gradient_predivide_factor`` is given
            with an op other than Average.
    """
    checked_passes(backward_passes_per_step)
    keras_2 = is_keras_2(optimizer)
    if not keras_2 and not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(f"DistributedOptimizer requires a Keras optimizer, not {type(optimizer)}.")
    scales, halves = keras.optimizers.LossScaleOptimizer, keras.config.dtype_policy().name == "mixed_float16"
    if not keras_2 and halves and not isinstance(optimizer, scales):
        # What compile() would do otherwise, the other way round: then each rank would decide by its own
        # gradients whether to make a step, and only some of them would come to the reduction.
        optimizer = scales(optimizer)
    how = of_gradients(
        op, gradient_predivide_factor, process_set, compression,
        weight_of_steps(batches, op_of(op), backward_passes_per_step), sparse_as_dense, groups, num_groups,
    )  # fmt: skip
    if keras_2:
        from ..tensorflow.gradients import make_for_keras_2

        return make_for_keras_2(
            optimizer, how, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients
        )
    if backward_passes_per_step > 1 and not average_aggregated_gradients:
        # Keras averages what it has accumulated.
        how = how._replace(postscale=how.postscale * backward_passes_per_step)
    return make_distributed(optimizer, how, backward_passes_per_step, scale_local_gradients)


def is_keras_2(thing: Any) -> bool:
    """Return whether an object is of a class of ``tf_keras``, which need not be installed."""
    return any(kind.__module__.partition(".")[0] == "tf_keras" for kind in type(thing).__mro__)


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """Wrap a Keras optimizer: it reduces gradients over all ranks, except those of some layers.

    Args:
        optimizer: an optimizer of Keras 3 or of ``tf_keras``.
        args: further arguments of :func:`DistributedOptimizer`.
        local_layers: one or several built layers. Every rank has its own weights of these layers, and their
            gradients are not reduced.
        kwargs: further keyword arguments of :func:`DistributedOptimizer`.

    Returns:
        a new optimizer with the configuration of ``optimizer``, of a class derived from its class.

    Raises:
        ConfigError: ``optimizer`` is not a Keras optimizer, or an argument is invalid.
    """
    distributed = DistributedOptimizer(optimizer, *args, **kwargs)
    register_layers(local_layers, distributed.register_local_var)
    return distributed


@documented
def load_model(
    filepath: Any, custom_optimizers: Optional[Sequence[type]] = None,
    custom_objects: Optional[Dict[str, Any]] = None, compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:  # fmt: skip
    """Load a saved model by ``keras.models.load_model`` and make its optimizer distributed.

    Args:
        {keras_load}

    Returns:
        the model. Its optimizer has its saved state, and reduces gradients over all ranks.
    """
    return loaded(keras.models.load_model, filepath, custom_optimizers, custom_objects, compression)


def loaded(
    load: Callable[..., Any], filepath: Any, custom_optimizers: Optional[Sequence[type]],
    custom_objects: Optional[Dict[str, Any]], compression: Any,
) -> Any:  # fmt: skip
    """Load a model by the given function of Keras 2 or 3, as :func:`load_model` does."""
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = load(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        how = of_gradients(ReduceOp.AVERAGE, 1.0, global_process_set, compression)
        if is_keras_2(optimizer):
            from ..tensorflow.gradients import make_for_keras_2

            make_for_keras_2(optimizer, how, in_place=True)
        else:
            make_distributed(optimizer, how, in_place=True)
    return model
