"""Elastic training (``hvd.elastic``): training continues after a rank is lost or added."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Sized, Tuple, Type

import torch
from torch.utils.data import Sampler

from .. import api
from ..elastic.parts import PartsState
from ..elastic.sampler import plan_share
from ..elastic.state import DictPart, ObjectState, Part, State, run
from .state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "ElasticSampler", "ObjectState", "State", "TorchState", "get_handler_registry", "run",
    "set_handler_registry",
]  # fmt: skip


class ElasticSampler(Sampler):
    """Distributes samples over the ranks, and redistributes the remaining ones when the ranks change.

    Pass it to a :class:`TorchState`, call :meth:`record_batch` after each batch and :meth:`set_epoch` at
    the end of each epoch.

    Args:
        dataset: its size must not change.
        shuffle: whether to shuffle, in a different order each epoch.
        seed: of the shuffling; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, with all samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> Dict[str, Any]:
        """The epoch, and the number of samples processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Continue from a state, with the current ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the samples that have not been processed over the current ranks."""
        self.num_replicas = api.size()
        self.rank = api.rank()
        share = plan_share(
            len(self.dataset), self.rank, self.num_replicas, self.epoch, self.seed, self.shuffle,
            self.processed_num,
        )  # fmt: skip
        self.remaining_indices = share.remaining
        self.indices: List[int] = share.indices
        self.num_samples = len(share.indices)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


def _model_part(model: torch.nn.Module) -> DictPart:
    return DictPart(model, lambda value: broadcast_parameters(value.state_dict(), 0))


def _optimizer_part(optimizer: torch.optim.Optimizer) -> DictPart:
    return DictPart(optimizer, lambda value: broadcast_optimizer_state(value, 0))


Registry = List[Tuple[Type[Any], Callable[[Any], Part]]]

_registry: Registry = [
    (torch.nn.Module, _model_part),
    (torch.optim.Optimizer, _optimizer_part),
    (ElasticSampler, DictPart),
]


def get_handler_registry() -> Registry:
    """The handlers of :class:`TorchState`: pairs of a type, and a function that wraps a value of it."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the handlers of :class:`TorchState`."""
    global _registry
    _registry = registry


class TorchState(PartsState):
    """The state of elastic training: a model, an optimizer, samplers and plain values, as attributes.

    ::

        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    Args:
        model: a ``torch.nn.Module``.
        optimizer: a ``torch.optim.Optimizer``.
        **kwargs: further values by name, for example samplers, ``epoch`` and ``batch``.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        parts: Dict[str, Part] = {}
        for name, value in list(values.items()):
            make = next((make for kind, make in _registry if isinstance(value, kind)), None)
            if make is not None:
                parts[name] = make(values.pop(name))
        super().__init__(parts, **values)
