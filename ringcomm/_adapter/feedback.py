"""Error feedback: the compression error of each gradient, to be added to the next one.

Residuals belong to parameters by name, so they survive new buckets, and a program can save them. Every rank
has other residuals.
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
        """Return the flat residual of a parameter; zeros at first."""
        known = self._arrays.get(name)
        if known is None or known.size != items:
            known = self._arrays[name] = np.zeros(items, np.float32)
        return known

    def side_by_side(
        self, names: Sequence[str], sizes: Sequence[int], starts: Sequence[int], count: int
    ) -> Array:
        """Return the residuals of several parameters in one array, which replaces the separate ones.

        The array has ``count`` elements; those that belong to no parameter are zero.
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
        """Forget all residuals; return how many parameters had one."""
        lost = sum(1 for array in self._arrays.values() if array.any())
        for array in self._arrays.values():
            array[:] = 0
        return lost

    def scale(self, factor: float) -> None:
        """Multiply all residuals, for example after the scale of losses has changed by that factor."""
        for array in self._arrays.values():
            np.multiply(array, np.float32(factor), out=array)

    def state(self) -> Dict[str, Array]:
        """Return copies by parameter name, for a checkpoint of this rank."""
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
