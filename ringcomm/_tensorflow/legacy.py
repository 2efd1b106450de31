"""Optimizers of Keras 2 (``tf_keras``, which ``TF_USE_LEGACY_KERAS=1`` makes ``tf.keras``)."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from .accumulation import Accumulator
from .gradients import GradientReducer, ReducingOptimizer

_classes: Dict[Any, Any] = {}


class _Distributed(ReducingOptimizer):
    """What a distributed optimizer of Keras 2 has besides what the user's own has.

    ``apply_gradients()`` is what both ``model.fit`` and training loops of users' own come to. Gradients are
    clipped behind it, after the reduction (but by optimizers of ``tf_keras.optimizers.legacy`` before it).
    Methods that compute gradients return reduced ones, as in Horovod, and what is applied next is not
    reduced again. With several passes per step sums are reduced instead, where they are applied.
    """

    _agg_helper: Optional[Accumulator] = None
    _gradients_are_reduced = False

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Like the optimizer's own, then reduced over all ranks."""
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> List[Any]:
        """The same, under the name that it has in older optimizers."""
        own: Any = super()
        if hasattr(own, "_compute_gradients"):
            pairs = own._compute_gradients(loss, var_list, grad_loss, tape)
        else:
            pairs = own.compute_gradients(loss, var_list, tape)
        return self._reduced_once(list(pairs))

    def get_gradients(self, loss: Any, params: Any) -> List[Any]:
        """Like the optimizer's own, then reduced over all ranks."""
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        return [gradient for gradient, _ in self._reduced_once(list(zip(gradients, params)))]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the optimizer's own, with the gradients of all ranks."""
        pairs = list(grads_and_vars)
        own = super().apply_gradients  # type: ignore[misc]
        if self._agg_helper is not None:
            self._agg_helper.step(
                pairs,
                lambda sums: own(self._reduced(sums, "keras"), *args, **kwargs),
                lambda: self.iterations.assign_add(1),  # type: ignore[attr-defined]
            )
            return self.iterations  # type: ignore[attr-defined]
        done = self._gradients_are_reduced
        _set(self, "_gradients_are_reduced", False)
        return own(pairs if done else self._reduced(pairs, "keras"), *args, **kwargs)

    def _reduced_once(self, pairs: List[Any]) -> List[Any]:
        if self._agg_helper is not None:
            return pairs
        reduced = self._reduced(pairs, "keras")
        _set(self, "_gradients_are_reduced", True)
        return list(reduced)


def make_distributed(
    optimizer: Any,
    reducer: GradientReducer,
    in_place: bool = False,
    accumulator: Optional[Accumulator] = None,
) -> Any:
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
    _set(distributed, "_reducer", reducer)
    _set(distributed, "_agg_helper", accumulator)
    return distributed


def _set(optimizer: Any, name: str, value: Any) -> None:
    # Past TensorFlow's bookkeeping, which would take it for something to save.
    object.__setattr__(optimizer, name, value)
