"""``DistributedOptimizer``: an MXNet optimizer that averages gradients over all ranks before it uses them."""

from __future__ import annotations

from functools import wraps
from typing import Any, Dict, Sequence

import mxnet as mx

from .. import api
from .._adapter.reduction import of_gradients
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from ..errors import ConfigError
from ..ops import ReduceOp
from .compression import Compression
from .reducer import GradientReducer

_OWN = ("_optimizer", "_options", "_reducer")

_ALL = 1 << 31  # more than any model has parameters: MXNet passes all gradients of a step in one call


def _of_the_other(name: str) -> Any:
    """Return a method, with MXNet's description, that calls the one of the other optimizer."""

    @wraps(getattr(mx.optimizer.Optimizer, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._optimizer, name)(*args, **kwargs)

    return call


@documented
class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer that averages gradients over all ranks, then updates weights as another optimizer does.

    Example: ``trainer = mx.gluon.Trainer(params, hvd.DistributedOptimizer(optimizer), kvstore=None)``.

    It is for ``Module`` and for ``gluon.Trainer``; :class:`DistributedTrainer` needs none. Attributes are
    those of the other optimizer, to read and to assign.

    Args:
        optimizer: any optimizer of MXNet.
        {mx_gradient_predivide_factor}
        {mx_num_groups}
        {process_set}

    Raises:
        ConfigError: it is not an optimizer, or is distributed already; or ``num_groups`` is negative.
    """

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise ConfigError(
                "DistributedOptimizer takes an optimizer of MXNet, like mx.optimizer.create('sgd'), not a "
                f"{type(optimizer).__name__}."
            )
        self._optimizer = optimizer
        self._options = (gradient_predivide_factor, num_groups, process_set)
        how = of_gradients(
            ReduceOp.AVERAGE, gradient_predivide_factor, process_set, Compression.none, num_groups=num_groups
        )
        self._reducer = GradientReducer(how)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # gluon.Trainer assigns rescale_grad in every step: that must reach the optimizer that uses it.
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __getstate__(self) -> Dict[str, Any]:
        factor, num_groups, process_set = self._options
        ranks = None if process_set is global_process_set else process_set.ranks
        return {"optimizer": self._optimizer, "options": (factor, num_groups), "ranks": ranks}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        process_set = global_process_set
        if state["ranks"] is not None:
            process_set = ProcessSet(state["ranks"])
            if api.is_initialized():
                process_set.process_set_id = api.context().engine.sets.find(process_set.ranks)
        factor, num_groups = state["options"]
        self.__init__(state["optimizer"], factor, num_groups, process_set)  # type: ignore[misc]

    @property
    def aggregate_num(self) -> int:
        """How many gradients MXNet passes in one call: all, so that they are reduced together."""
        return _ALL

    create_state = _of_the_other("create_state")
    create_state_multi_precision = _of_the_other("create_state_multi_precision")
    set_learning_rate = _of_the_other("set_learning_rate")
    set_lr_mult = _of_the_other("set_lr_mult")
    set_wd_mult = _of_the_other("set_wd_mult")

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average gradients over all ranks, in place, and update weights.

        Args:
            index: of a weight, or those of several weights; the same on all ranks.
            weight: the weight or weights.
            grad: the gradient or gradients.
            state: the state or states.

        Raises:
            PeerLostError: a rank was lost.
        """
        self._reduce_and_update(self._optimizer.update, index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average gradients over all ranks, in place, and update weights that may be float16.

        Args:
            index: of a weight, or those of several weights; the same on all ranks.
            weight: the weight or weights.
            grad: the gradient or gradients.
            state: the state or states.

        Raises:
            PeerLostError: a rank was lost.
        """
        self._reduce_and_update(self._optimizer.update_multi_precision, index, weight, grad, state)

    def _reduce_and_update(self, update: Any, index: Any, weight: Any, grad: Any, state: Any) -> None:
        several = isinstance(index, (tuple, list))
        indices: Sequence[Any] = index if several else [index]
        weights: Sequence[mx.nd.NDArray] = weight if several else [weight]
        gradients: Sequence[mx.nd.NDArray] = grad if several else [grad]
        names = [str(item) for item in indices]
        self._reducer.reduce(names, gradients, weights)
        step = self._optimizer.aggregate_num
        if not several:
            update(index, weight, grad, state)
        elif step:
            for start in range(0, len(indices), step):
                part = slice(start, start + step)
                update(indices[part], weights[part], gradients[part], state[part])
        else:
            for item in zip(indices, weights, gradients, state):
                update(*item)
