"""Compare the weights of all ranks once, at the beginning of training."""

from __future__ import annotations

from typing import Callable, Dict, Iterable
from weakref import WeakKeyDictionary

import numpy as np

from .. import api
from ..calls.process_set import ProcessSet, included_in, number_of
from ..dtypes import Array
from ..job.context import Context
from ..ops import ReduceOp

_AFTER = 5  # the reduction before which weights are compared: programs may broadcast after step 1

_ITEMS = 256  # compared elements

_PER_WEIGHT = 8


_reductions: WeakKeyDictionary[Context, Dict[str, int]] = WeakKeyDictionary()
"""By job and label; ranks that have joined an elastic job begin to count, as all others do again."""


def check_start(process_set: ProcessSet, label: str, weights: Callable[[], Iterable[Array]]) -> None:
    """Count a reduction of gradients; before one of the first, warn once if the weights of ranks differ.

    Averages of gradients do not make weights equal. Small differences are allowed: processors of different
    kinds round differently. ``label`` names what is trained, the same on all ranks; ``weights`` returns at
    least the first elements of each weight, in order.
    """
    context = api.context()
    counts = _reductions.setdefault(context, {})
    counts[label] = count = counts.get(label, 0) + 1
    if count == _AFTER and context.size > 1 and included_in(process_set):
        _compare(context, number_of(process_set), label, weights())


def _compare(context: Context, process_set: int, label: str, weights: Iterable[Array]) -> None:
    own = np.zeros(_ITEMS, np.float32)
    filled = 0
    for values in weights:
        part = values.reshape(-1)[: min(_PER_WEIGHT, _ITEMS - filled)]
        own[filled : filled + part.size] = part
        filled += part.size
    both = np.concatenate([own, -own])
    context.engine.allreduce(
        [both], ReduceOp.MAX, f"ringcomm.weights.{label}", process_set=process_set, urgent=True
    ).wait()
    highest, lowest = both[:_ITEMS].astype(np.float64), -both[_ITEMS:].astype(np.float64)
    apart, scale = np.abs(highest - lowest).sum(), np.abs(highest).sum() + np.abs(lowest).sum()
    if apart > 0.01 * scale and context.rank == min(context.engine.sets.members(process_set)):
        context.announce("different weights", _DIFFERENT)


_DIFFERENT = (
    "The ranks train different models: their weights were not equal when training began, and the average of "
    "gradients does not make them so. Broadcast the weights before the first step (broadcast_parameters, "
    "broadcast_variables or the callback for it), or load the same checkpoint on all ranks."
)
