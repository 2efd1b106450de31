"""Optimizers of Keras 2 (``tf_keras``, which ``TF_USE_LEGACY_KERAS=1`` makes ``tf.keras``)."""

from __future__ import annotations

from typing import Any, List, Optional

from .._adapter.reduction import OptionsInClass, convert, derive, set_untracked
from .gradients import Accumulator, GradientReducer, ReducingOptimizer


class _Distributed(OptionsInClass, ReducingOptimizer):
    """Mixin that adds the reduction to the class of the user's Keras 2 optimizer.

    Both ``model.fit`` and custom training loops call ``apply_gradients()``. It reduces gradients before they
    are clipped (optimizers of ``tf_keras.optimizers.legacy`` clip them before). Methods that compute
    gradients return reduced ones, as in Horovod, and the next ``apply_gradients()`` does not reduce them
    again. With several passes per step the sums are reduced, in ``apply_gradients()``.
    """

    _agg_helper: Optional[Accumulator] = None
    _gradients_are_reduced = False

    def _take_options(self, reducer: GradientReducer, accumulator: Optional[Accumulator]) -> None:
        set_untracked(self, "_reducer", reducer.fresh())
        set_untracked(self, "_agg_helper", None if accumulator is None else accumulator.fresh())

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Return pairs (gradient, variable) from the optimizer's method, reduced over all ranks.

        ``loss`` is a function, or a tensor that ``tape`` has recorded.
        """
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> List[Any]:
        """Do the same in older optimizers."""
        own: Any = super()
        if hasattr(own, "_compute_gradients"):
            pairs = own._compute_gradients(loss, var_list, grad_loss, tape)
        else:
            pairs = own.compute_gradients(loss, var_list, tape)
        return self._reduced_once(list(pairs))

    def get_gradients(self, loss: Any, params: Any) -> List[Any]:
        """Return the optimizer's gradients, reduced over all ranks, in the order of ``params``."""
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        return [gradient for gradient, _ in self._reduced_once(list(zip(gradients, params)))]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce pairs (gradient, variable) over all ranks, unless they are reduced, and apply them.

        Return the result of the optimizer's method; with several passes per step its step counter.
        """
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
        set_untracked(self, "_gradients_are_reduced", False)
        return own(pairs if done else self._reduced(pairs, "keras"), *args, **kwargs)

    def _reduced_once(self, pairs: List[Any]) -> List[Any]:
        if self._agg_helper is not None:
            return pairs
        reduced = self._reduced(pairs, "keras")
        set_untracked(self, "_gradients_are_reduced", True)
        return list(reduced)


def make_distributed(
    optimizer: Any,
    reducer: GradientReducer,
    in_place: bool = False,
    accumulator: Optional[Accumulator] = None,
) -> Any:
    """Create a distributed optimizer with the configuration of another one.

    ``in_place``: change the class of ``optimizer``, which keeps its state. Without an accumulator every batch
    is a step.
    """
    own = type(optimizer)
    kind = derive((own,) if issubclass(own, _Distributed) else (_Distributed, own), (reducer, accumulator))
    return convert(optimizer, kind) if in_place else kind.from_config(optimizer.get_config())
