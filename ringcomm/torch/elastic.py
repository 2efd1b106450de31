"""Elastic training (``hvd.elastic``): training continues after a rank is lost or added."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple, Type

import torch
from torch.utils.data import Sampler

from ..elastic import state as shared
from ..elastic.state import DictPart, ObjectState, PartsState, SamplerPart, State, StatePart, run
from .local_sgd import LocalSGD
from .optimizer import LocalDistributed
from .state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "ElasticSampler", "ObjectState", "State", "TorchState", "get_handler_registry", "run",
    "set_handler_registry",
]  # fmt: skip


class ElasticSampler(shared.ElasticSampler, Sampler):
    """Distributes samples over the ranks, and redistributes the remaining ones when the ranks change.

    Pass it to a :class:`TorchState`. Call :meth:`record_batch` after each batch and before the commit, and
    :meth:`set_epoch` at the end of each epoch. When the ranks change, an existing ``DataLoader`` uses the new
    distribution in its next iteration over the data.

    Args:
        dataset: the data set. Its size must not change.
        shuffle: whether to shuffle the samples, in a different order in each epoch.
        seed: seed for the shuffling; the same on all ranks.
    """


class LocalPart(StatePart):
    """Local steps: a commit averages weights before they are saved, so members that join get the mean."""

    def save(self) -> None:
        """Average the weights of all ranks, if these train together already."""
        if self.value._together():
            self.value.synchronize()

    def restore(self) -> None:
        """Do nothing: the weights are the model's."""

    def sync(self) -> None:
        """Start over with the next step, from rank 0's weights."""
        self.value._restart()


Registry = List[Tuple[Type[Any], Callable[[Any], StatePart]]]

_registry: Registry = [
    (torch.nn.Module, lambda item: DictPart(item, lambda it: broadcast_parameters(it.state_dict(), 0))),
    (torch.optim.Optimizer, lambda item: DictPart(item, lambda it: broadcast_optimizer_state(it, 0))),
    (ElasticSampler, SamplerPart),
    (LocalSGD, LocalPart),
]


def get_handler_registry() -> Registry:
    """Return the handlers of :class:`TorchState`: pairs of a type and a function that wraps a value of it."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the handlers of :class:`TorchState`."""
    global _registry
    _registry = registry


class TorchState(PartsState):
    """The state of elastic training. Its attributes are a model, an optimizer, samplers and plain values.

    ::

        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    Args:
        model: a ``torch.nn.Module``.
        optimizer: a ``torch.optim.Optimizer``.
        **kwargs: further values by name, for example samplers, ``epoch``, ``batch`` and :class:`LocalSGD`.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        if isinstance(optimizer, LocalDistributed):
            values = {"local_steps": optimizer.local, **values}
        # To save local steps takes other ranks, so it fails before anything else is saved, or not at all.
        values = dict(sorted(values.items(), key=lambda item: not isinstance(item[1], LocalSGD)))
        parts: Dict[str, StatePart] = {}
        for name, value in list(values.items()):
            make = next((make for kind, make in _registry if isinstance(value, kind)), None)
            if make is not None:
                parts[name] = make(values.pop(name))
        super().__init__(parts, **values)
