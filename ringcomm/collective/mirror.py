"""Arrays on devices, as collectives see them: each has a block of host memory through which it is sent.

A collective runs on the block. Its input is copied there before (:meth:`Mirror.fetch`), and its result back
after it (:meth:`Mirror.store`). Copies are asynchronous: the calling thread waits for those that it must
send, and never for those back, because the mirror keeps its block until they are done and the program's
stream waits for them on the device.

Copies of one array overlap with those of others, and with their collectives, not with its own: on an H200
they take a tenth of the time of the network, and cutting collectives into pieces that follow the copies made
them twice as slow (``benchmarks/results/device.json``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, Optional

import numpy as np


class Done(ABC):
    """The end of an asynchronous copy."""

    @abstractmethod
    def poll(self) -> bool:
        """Return whether the copy is done; raises DeviceError if it failed."""


Wait = Callable[[Done], None]
"""Waits for a copy; may raise an error instead."""


class Mirror(ABC):
    """An array on a device, and the block of host memory through which it is sent."""

    host: np.ndarray[Any, Any]  # as many elements, flat; defined only after a load
    shared = False  # ``host`` is the array itself; no writing to it before :meth:`fetch` has returned

    @abstractmethod
    def preload(self) -> None:
        """Start copying the whole array to the host."""

    @abstractmethod
    def store(self, start: int, stop: int) -> None:
        """Start copying the bytes ``[start, stop)`` of the host's block to the array."""

    @abstractmethod
    def fetch(self, wait: Wait, start: int = 0, stop: Optional[int] = None) -> None:
        """Copy bytes of the array to the host, unless that was begun before, and wait for them."""
