"""Arrays in memory that the processor and an integrated GPU share: the host works in it, and nothing is
copied.

Other arrays on devices have a *mirror*: a block of page-locked host memory, to which the elements are loaded
before a collective and from which the result is stored (:mod:`.mirrors`). In mapped memory the array is its
own mirror (:class:`MappedMirror`). :mod:`.operands` makes one for each argument of a collective in place.

Such memory is page-locked and mapped. On some boards (Jetson before Xavier) the processor does not cache it,
and additions in it are much slower than a copy to ordinary memory and back. So that is measured, once for
each device; :attr:`StagingPool.direct <.mirrors.StagingPool.direct>` keeps the result.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Optional

import numpy as np

from ..collective.mirror import Done
from .kinds import CopyEngine
from .mirrors import BlockMirror

logger = logging.getLogger("ringcomm")

MAX_SLOWDOWN = 2.0
"""Up to here additions in mapped memory cost less than copying it out and back."""

_TRIED_BYTES = 1 << 20
_TRIES = 7


def slowdown(mapped: np.ndarray[Any, Any]) -> float:
    """Return the factor by which additions in this memory (flat uint8) are slower than in ordinary memory."""
    ordinary = np.zeros(mapped.size, np.uint8)
    mapped[:] = 0
    return _add_s(mapped) / max(_add_s(ordinary), 1e-9)


def _add_s(block: np.ndarray[Any, Any]) -> float:
    numbers = block.view(np.float32)
    best_s = float("inf")
    for _ in range(_TRIES):
        began_s = time.perf_counter()
        np.add(numbers, numbers, out=numbers)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def uses_mapped(engine: CopyEngine, device: object) -> bool:
    """Measure, and log, whether the host should work in mapped arrays of a device directly: False if it
    shares no memory with the host, or additions there are more than :data:`MAX_SLOWDOWN` times as slow; the
    arrays are then copied like others.
    """
    found: Optional[float] = engine.mapped_slowdown(_TRIED_BYTES, slowdown)
    if found is None:
        return False
    direct = found <= MAX_SLOWDOWN
    logger.info(
        "Additions in the mapped memory of %s take %.1f times as long as in ordinary memory: %s.",
        device, found, "arrays there are used without a copy" if direct else "arrays there are copied",
    )  # fmt: skip
    return direct


class MappedMirror(BlockMirror):
    """A flat array that is its own block: a load waits for the program's stream, a store does nothing. The
    host must not write to the elements before that wait is over.
    """

    shared = True

    def __init__(self, engine: CopyEngine, host: np.ndarray[Any, Any]) -> None:
        self._block = None
        self.host = host
        self.nbytes = host.nbytes
        # The load is what the calling thread's current stream has still to do: begun already.
        self._load: Optional[Done] = engine.reached(engine.mark())

    def preload(self) -> None:
        """Do nothing: the elements are there after the pending work of the program's stream."""

    def store(self, start: int, stop: int) -> None:
        """Do nothing: the elements are there already."""

    def keep_source(self) -> None:
        """Do nothing: only arrays that a collective overwrites are used without a copy."""

    def finish(self) -> None:
        """Do nothing: the result is there when the call returns."""

    def release(self) -> None:
        """Do nothing: the array's owner frees the memory."""
