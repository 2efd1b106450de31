"""Framework-independent computations of training callbacks: learning rate schedules, averaged metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Union

import numpy as np

from .. import api
from ..errors import ConfigError
from .graph_callbacks import Batch, Operation
from .reduction import Reduction

Multiplier = Union[float, Callable[[float], float]]


@dataclass
class Schedule:
    """A learning rate: a multiplier, or a function of the epoch, with fractions unless ``staircase``."""

    initial_lr: float
    multiplier: Multiplier
    start_epoch: int = 0
    end_epoch: Optional[int] = None
    staircase: bool = True
    steps_per_epoch: Optional[int] = None

    def __post_init__(self) -> None:
        if self.initial_lr is None:
            raise ConfigError("initial_lr is required: the learning rate that the multiplier applies to.")
        self.initial_lr = float(self.initial_lr)

    def rate(self, epoch: int, batch: int) -> Optional[float]:
        """Return the learning rate for a batch, or None to keep it."""
        if epoch < self.start_epoch or self.end_epoch is not None and epoch >= self.end_epoch:
            return None
        if not callable(self.multiplier):
            return self.initial_lr * self.multiplier if batch == 0 else None
        if self.staircase:
            return self.initial_lr * self.multiplier(epoch) if batch == 0 else None
        if not self.steps_per_epoch:
            raise ConfigError(
                "steps_per_epoch is required: Keras does not report the number of batches per epoch."
            )
        return self.initial_lr * self.multiplier(epoch + float(batch) / self.steps_per_epoch)


def warmup(size: int, warmup_epochs: float, epoch: float) -> float:
    """Return the multiplier of an epoch, which rises from 1/size to 1 over some epochs. Training starts with
    the learning rate of one rank and reaches ``initial_lr``, which is that of one rank multiplied by the
    number of ranks (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
    """
    if not warmup_epochs:
        return 1.0
    return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)


def averaged(logs: Dict[str, Any], samples: Optional[int] = None) -> Dict[str, float]:
    """Return averages over all ranks of the metrics that are numbers, by ``samples`` except validation's."""
    names = sorted(name for name, value in logs.items() if np.ndim(value) == 0 and _is_number(value))
    if not names or api.context().size == 1:
        return {name: float(logs[name]) for name in names}
    weighted = [name for name in names if samples is not None and not name.startswith("val_")]
    operations, inputs, order = [], [], []
    for part in (weighted, [name for name in names if name not in weighted]):
        if not part:
            continue
        # The operation's name contains the metrics' names: ranks with different metrics get an error.
        label = f"metrics: {', '.join(part)}"
        has_weight = part is weighted
        operations.append(Operation("allreduce", Reduction(), label, 1 + has_weight, has_weight=has_weight))
        inputs.append(np.array([float(logs[name]) for name in part], np.float64))
        if has_weight:
            inputs.append(np.float64(samples))
        order += part
    means = np.concatenate(Batch(operations).run(inputs))
    return {name: float(mean) for name, mean in zip(order, means)}


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
