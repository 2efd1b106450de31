"""Arrays whose memory the processor and an integrated GPU share: the host works in it, and nothing is copied.

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
    """Return how many times as long an addition takes in this memory as in ordinary memory.

    Args:
        mapped: one-dimensional, uint8.
    """
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
    """Return whether the host is to work in mapped arrays of a device directly.

    Measured by every call, and logged.

    Args:
        engine: of the device.
        device: its name or number, for the log.

    Returns:
        False if the device shares no memory with the host, or additions there are more than
        :data:`MAX_SLOWDOWN` times as slow as in ordinary memory; the arrays are then copied like others.
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
    """A flat array that is its own block: a load waits for the program's stream, a store is nothing.

    The host must not write to the elements before that wait is over.

    Args:
        engine: of the array's device.
        host: the array's memory as the host sees it, flat.
    """

    shared = True

    def __init__(self, engine: CopyEngine, host: np.ndarray[Any, Any]) -> None:
        self._block = None
        self.host = host
        self.nbytes = host.nbytes
        # The load is what the calling thread's current stream has still to do: begun already.
        self._load: Optional[Done] = engine.reached(engine.mark())

    def preload(self) -> None:
        """Nothing: what the program's stream has to do comes first, and then the elements are there."""

    def store(self, start: int, stop: int) -> None:
        """Nothing: the elements are there already."""

    def keep_source(self) -> None:
        """Nothing: only arrays that a collective overwrites are used without a copy."""

    def finish(self) -> None:
        """Nothing: the result is there when the call returns."""

    def release(self) -> None:
        """Nothing: the array's owner frees the memory."""
