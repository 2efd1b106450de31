"""Parts of a model that are exchanged together, and the exchange of one."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..calls.process_set import ProcessSet, number_of
from ..dtypes import Array
from ..engine.request import Handle
from ..job.context import Context
from ..ops import ReduceOp
from .compression import BLOCKWISE, MIN_ITEMS


class Exchange(NamedTuple):
    """The reduction of a fragment that is running."""

    until: int  # the local step after which its result is taken
    handles: List[Handle]
    started: Dict[int, Array]  # by place: the weights at its beginning; empty if it is waited for at once
    deltas: Dict[int, Array]  # by place: the arrays in the average
    distance: float  # squared norm of this rank's deltas
    before: List[Array]  # the arrays to be averaged, at its beginning
    means: List[Array]  # receives their averages
    facts: Optional[Array]  # receives the average of the ranks' numbers, with the last fragment


def divided(sizes: Sequence[int], parts: int) -> List[List[int]]:
    """Divide neighbouring places into ``parts`` of similar total size; parts may be empty.

    >>> divided([4, 4, 1, 1, 6], 2)
    [[0, 1], [2, 3, 4]]
    """
    found: List[List[int]] = [[] for _ in range(parts)]
    total, reached = max(1, sum(sizes)), 0
    for place, size in enumerate(sizes):
        found[min(parts - 1, (2 * reached + size) * parts // (2 * total))].append(place)
        reached += size
    return found


def square(array: Array) -> float:
    """Return the squared norm of an array."""
    flat = array.reshape(-1)
    return float(np.dot(flat, flat))


class Averages:
    """Start averages of arrays, in place; large arrays are sent with ``codec``."""

    def __init__(self, context: Context, name: str, process_set: ProcessSet, codec: str) -> None:
        self.context = context
        self._name, self._process_set, self.codec = name, process_set, codec
        self.lossy = codec in BLOCKWISE

    def start_coded(
        self,
        label: str,
        arrays: Dict[int, Array],
        residuals: Sequence[Array],
        weight: Optional[float] = None,
        absent: int = 0,
    ) -> List[Tuple[List[int], Handle]]:
        """Start one reduction for each codec, on arrays and residuals by place; return places and handles.

        ``weight`` is this rank's, if ranks have weights; ``absent`` is a bit mask of the places that it
        lacks.
        """
        groups: Dict[str, List[int]] = {}
        for place, array in arrays.items():
            groups.setdefault(self._codec_of(array), []).append(place)
        found = []
        for codec, places in sorted(groups.items()):
            own = [residuals[place] for place in places] if codec in BLOCKWISE else []
            bits = sum(1 << bit for bit, place in enumerate(places) if absent >> place & 1)
            chosen = [arrays[place] for place in places]
            found.append((places, self.start(f"{label}{codec}", chosen, codec, own, weight, bits)))
        return found

    def start(
        self,
        label: str,
        arrays: Sequence[Array],
        codec: str = "none",
        residuals: Sequence[Array] = (),
        weight: Optional[float] = None,
        absent: int = 0,
    ) -> Handle:
        """Start one reduction; arguments as of :meth:`start_coded`."""
        engine, process_set = self.context.engine, number_of(self._process_set)
        engine.finish_earlier(f"{self._name}.{label}", process_set)  # of one that the program has left
        return engine.allreduce(
            [array.reshape(-1) for array in arrays], ReduceOp.AVERAGE, f"{self._name}.{label}",
            [array.shape for array in arrays], process_set=process_set,
            compression=codec, residuals=residuals, weight=weight, absent=absent,
        )  # fmt: skip

    def _codec_of(self, array: Array) -> str:
        if not self.lossy or (array.ndim > 1 and array.size >= MIN_ITEMS):
            return self.codec
        return "bf16"
