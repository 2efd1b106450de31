"""Compare the parameters of all ranks: every ``RINGCOMM_CHECK_EVERY`` steps, and once at the beginning."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Optional, Sequence, Tuple

import numpy as np

from .. import api
from ..calls.consistency import compare
from ..calls.process_set import ProcessSet, included_in, number_of
from ..dtypes import Array
from ..job.context import Context
from ..ops import ReduceOp

_AFTER = 5  # the reduction before which weights are compared: programs may broadcast after step 1

_ITEMS = 256  # compared elements

_PER_WEIGHT = 8

Named = Sequence[Tuple[str, Any]]


class StepCheck:
    """Count steps and compare the parameters of all ranks every ``RINGCOMM_CHECK_EVERY`` steps."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._steps = 0

    def stepped(self, named: Callable[[], Named]) -> None:
        """Count a step, and compare the parameters if it is time; DesyncError if they differ.

        ``named`` returns pairs (name, array), in the same order on all ranks.
        """
        context = api.context()
        every = context.settings.check_every
        self._steps += 1
        if every and self._steps % every == 0 and context.size > 1 and included_in(self._process_set):
            compare(context, named(), number_of(self._process_set))


class StartCheck:
    """Warn once if the ranks train different models: averages of gradients do not make weights equal.

    Some elements of the weights are compared at one reduction of gradients, in which all ranks take part.
    Small differences are allowed: processors of different kinds round differently.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._context: Optional[Context] = None
        self._count = 0

    def reducing(self, label: str, weights: Callable[[], Iterable[Array]]) -> None:
        """Count a reduction of gradients, and compare the weights if it is time.

        ``label`` is the same on all ranks; ``weights`` returns at least the first elements of each weight, in
        order.
        """
        context = api.context()
        if context is not self._context:
            self._context, self._count = context, 0  # ranks that have joined an elastic job begin to count
        self._count += 1
        if self._count == _AFTER and context.size > 1 and included_in(self._process_set):
            self._compare(context, label, weights())

    def _compare(self, context: Context, label: str, weights: Iterable[Array]) -> None:
        own = np.zeros(_ITEMS, np.float32)
        filled = 0
        for values in weights:
            part = values.reshape(-1)[: min(_PER_WEIGHT, _ITEMS - filled)]
            own[filled : filled + part.size] = part
            filled += part.size
        both = np.concatenate([own, -own])
        number = number_of(self._process_set)
        context.engine.allreduce(
            [both], ReduceOp.MAX, f"ringcomm.weights.{label}", process_set=number, urgent=True
        ).wait()
        highest, lowest = both[:_ITEMS].astype(np.float64), -both[_ITEMS:].astype(np.float64)
        apart, scale = np.abs(highest - lowest).sum(), np.abs(highest).sum() + np.abs(lowest).sum()
        if apart > 0.01 * scale and context.rank == min(context.engine.sets.members(number)):
            context.announce("different weights", _DIFFERENT)


_DIFFERENT = (
    "The ranks train different models: their weights were not equal when training began, and the average of "
    "gradients does not make them so. Broadcast the weights before the first step (broadcast_parameters, "
    "broadcast_variables or the callback for it), or load the same checkpoint on all ranks."
)
