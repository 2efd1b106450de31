"""Training that goes on after a rank is lost: ``hvd.elastic``."""

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
    """Deals out samples to the ranks, and deals out the rest again when there are other ranks.

    Put it into a :class:`TorchState`, call :meth:`record_batch` after each batch and :meth:`set_epoch` at
    the end of each epoch.

    Args:
        dataset: of a size that does not change.
        shuffle: in another order each epoch.
        seed: for the shuffling; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> Dict[str, Any]:
        """Where it is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Go on from there, with the ranks of now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out what has not been processed among the ranks of now."""
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
    """How values of certain types are kept and made the same: pairs of a type and what makes a part."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Keep values in other ways from now on."""
    global _registry
    _registry = registry


class TorchState(PartsState):
    """Models, optimizers and samplers, each in its own way, and plain values: all are attributes.

    ::

        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        parts: Dict[str, Part] = {}
        for name, value in list(values.items()):
            make = next((make for kind, make in _registry if isinstance(value, kind)), None)
            if make is not None:
                parts[name] = make(values.pop(name))
        super().__init__(parts, **values)
