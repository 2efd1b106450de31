"""Optimizers of Keras 2 (``tf_keras``, which ``TF_USE_LEGACY_KERAS=1`` makes ``tf.keras``)."""

from __future__ import annotations

from typing import Any, List, Optional

from .._adapter.optimizer_classes import OptionsInClass, convert, derive, set_untracked
from .accumulation import Accumulator
from .gradients import GradientReducer, ReducingOptimizer


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
        """Compute gradients with the optimizer's own method and reduce them over all ranks.

        Args:
            loss: the loss, a tensor or a function that returns it.
            var_list: the variables.
            tape: the tape that has recorded the loss, if it is a tensor.

        Returns:
            a list of pairs (gradient, variable).
        """
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> List[Any]:
        """The method of older optimizers for the same purpose."""
        own: Any = super()
        if hasattr(own, "_compute_gradients"):
            pairs = own._compute_gradients(loss, var_list, grad_loss, tape)
        else:
            pairs = own.compute_gradients(loss, var_list, tape)
        return self._reduced_once(list(pairs))

    def get_gradients(self, loss: Any, params: Any) -> List[Any]:
        """Compute gradients with the optimizer's own method and reduce them over all ranks.

        Args:
            loss: the loss tensor.
            params: the variables.

        Returns:
            the reduced gradients, in the order of ``params``.
        """
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        return [gradient for gradient, _ in self._reduced_once(list(zip(gradients, params)))]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce gradients over all ranks, unless they are reduced already, and apply them.

        Args:
            grads_and_vars: pairs (gradient, variable).
            args: further arguments of the optimizer's own method.
            kwargs: the same, passed by keyword.

        Returns:
            the result of the optimizer's own method; with several passes per step its step counter.
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

    Args:
        optimizer: the user's optimizer.
        reducer: reduces the gradients.
        in_place: change the class of ``optimizer`` itself, which keeps its state.
        accumulator: sums the gradients of several batches; None: every batch is a step.
    """
    own = type(optimizer)
    kind = derive((own,) if issubclass(own, _Distributed) else (_Distributed, own), (reducer, accumulator))
    return convert(optimizer, kind) if in_place else kind.from_config(optimizer.get_config())
