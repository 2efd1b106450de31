"""Optimizers of Keras 2 (``tf_keras``, which ``TF_USE_LEGACY_KERAS=1`` makes ``tf.keras``)."""

from __future__ import annotations

from typing import Any, Dict

from .gradients import GradientReducer, ReducingOptimizer

_classes: Dict[Any, Any] = {}


class _Distributed(ReducingOptimizer):
    """What a distributed optimizer of Keras 2 has besides what the user's own has.

    ``apply_gradients()`` is what both ``model.fit`` and training loops of users' own come to. Gradients are
    clipped behind it, after the reduction (but by optimizers of ``tf_keras.optimizers.legacy`` before it).
    """

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the optimizer's own, with the gradients of all ranks."""
        return super().apply_gradients(self._reduced(grads_and_vars, "keras"), *args, **kwargs)  # type: ignore[misc]


def make_distributed(optimizer: Any, reducer: GradientReducer, in_place: bool = False) -> Any:
    """A distributed optimizer with the configuration of another one, or that one itself, with its state."""
    own = type(optimizer)
    if own not in _classes:
        # With the same names: what is saved with a model names Keras's own class.
        facts = {"__doc__": own.__doc__, "__module__": own.__module__}
        new = own if issubclass(own, _Distributed) else type(own.__name__, (_Distributed, own), facts)
        _classes[own] = new
    if in_place:
        optimizer.__class__ = _classes[own]
        distributed = optimizer
    else:
        distributed = _classes[own].from_config(optimizer.get_config())
    # Past TensorFlow's bookkeeping, which would take it for something to save.
    object.__setattr__(distributed, "_reducer", reducer)
    return distributed
