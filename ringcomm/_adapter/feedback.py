"""Error feedback: what compression lost of each gradient, to be added to the next one.

Residuals belong to parameters by name, so they survive when buckets are made anew, and a program can save
them. They are those of one rank: every rank has its own.
"""

from __future__ import annotations

import logging
from typing import Dict, Mapping, Sequence

import numpy as np

from ..dtypes import Array

logger = logging.getLogger(__name__)


class Residuals:
    """The residuals of one rank, float32, by parameter name."""

    def __init__(self) -> None:
        self._arrays: Dict[str, Array] = {}

    def of(self, name: str, items: int) -> Array:
        """The residual of a parameter, flat; zeros at first."""
        known = self._arrays.get(name)
        if known is None or known.size != items:
            known = self._arrays[name] = np.zeros(items, np.float32)
        return known

    def side_by_side(
        self, names: Sequence[str], sizes: Sequence[int], starts: Sequence[int], count: int
    ) -> Array:
        """The residuals of several parameters as parts of one array, which replaces what was kept of them.

        Args:
            names: of the parameters.
            sizes: their numbers of elements.
            starts: where each begins.
            count: length of the array; what belongs to no parameter is zero.
        """
        whole = np.zeros(count, np.float32)
        for name, items, start in zip(names, sizes, starts):
            part = whole[start : start + items]
            part[:] = self.of(name, items)
            self._arrays[name] = part
        return whole

    def drop(self, names: Sequence[str]) -> None:
        """Forget the residuals of some parameters."""
        for name in names:
            self._arrays.pop(name, None)

    def reset(self, why: str) -> None:
        """Forget all residuals, and log that in one line if there were any."""
        reset_all([self], why)

    def clear(self) -> int:
        """Forget all residuals; of how many parameters there were any."""
        lost = sum(1 for array in self._arrays.values() if array.any())
        for array in self._arrays.values():
            array[:] = 0
        return lost

    def scale(self, factor: float) -> None:
        """Multiply all residuals, for example when the scale of losses has changed by that factor."""
        for array in self._arrays.values():
            np.multiply(array, np.float32(factor), out=array)

    def state(self) -> Dict[str, Array]:
        """Copies, by parameter name, for a checkpoint of this rank."""
        return {name: array.copy() for name, array in self._arrays.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Continue with the residuals of :meth:`state`; parameters that are not in it start with zeros."""
        for name, array in self._arrays.items():
            array[:] = state[name] if name in state and state[name].size == array.size else 0
        for name, given in state.items():
            if name not in self._arrays:
                self._arrays[name] = np.array(given, np.float32).reshape(-1)


def reset_all(residuals: Sequence[Residuals], why: str) -> None:
    """Forget the residuals of several groups of parameters, and log that in one line if there were any."""
    lost = sum(item.clear() for item in residuals)
    if lost:
        logger.info("error feedback of %d parameters is dropped: %s", lost, why)
