"""Arrays on devices, as collectives see them: each has a block of host memory through which it is sent.

A collective runs on the block. What it reads is copied there before (:meth:`Mirror.fetch`), and its result is
copied back after it (:meth:`Mirror.store`). Copies are asynchronous: the calling thread waits for those that
it must send, and never for those back, because the mirror keeps its block until they are done and the
program's stream waits for them on the device.

Copies of one array overlap with those of others, and with their collectives, not with its own: on an H200
they take a tenth of the time of the network, and cutting collectives into pieces that follow the copies made
them twice as slow (``benchmarks/results/device.json``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, Optional, Union

import numpy as np

from .device_group import DeviceGroup, DevicePort


class Done(ABC):
    """The end of an asynchronous copy."""

    @abstractmethod
    def poll(self) -> bool:
        """Return whether the copy is done.

        Raises:
            DeviceError: it failed.
        """


Wait = Callable[[Done], None]
"""Waits for a copy; may raise an error instead."""


class Mirror(ABC):
    """An array on a device, and the block of host memory through which it is sent.

    Attributes:
        host: as many elements, flat; what they are is defined only where a load is done.
        shared: whether :attr:`host` is the array itself. Then nothing is copied, and the host must not write
            to it before :meth:`fetch` has returned.
    """

    host: np.ndarray[Any, Any]
    shared = False

    @abstractmethod
    def preload(self) -> None:
        """Start copying the whole array to the host."""

    @abstractmethod
    def store(self, start: int, stop: int) -> None:
        """Start copying the bytes ``[start, stop)`` of the host's block to the array."""

    @abstractmethod
    def fetch(self, wait: Wait, start: int = 0, stop: Optional[int] = None) -> None:
        """Copy bytes of the array to the host, unless that was begun before, and wait for them.

        Args:
            wait: waits for a copy.
            start, stop: which bytes; None: to the end.
        """

    def port(self, owner: object) -> Union[DevicePort, str]:
        """Return how the array's device becomes a member of a group, or why it cannot.

        Args:
            owner: makes the group. Only one owner is served, because devices of different ranks could begin
                with the work of different groups, and wait for each other for ever.
        """
        del owner
        return "its arrays are in host memory"

    def enter(self, group: DeviceGroup, wait: Wait) -> Any:
        """The array in which the result grows, for a group's work, which comes after the program's.

        Args:
            group: does the work.
            wait: waits for a copy.
        """
        raise NotImplementedError

    def part(self, array: Any, start: int, stop: int) -> Mirror:
        """A mirror of the elements ``[start, stop)`` of what :meth:`enter` gave, after the current stream."""
        raise NotImplementedError

    def leave(self, group: DeviceGroup) -> None:
        """The result is in the array when the group has come here."""
        raise NotImplementedError

    def finish(self) -> None:
        """Let the calling thread's current stream wait for the result; see the kinds of mirrors."""
        raise NotImplementedError
