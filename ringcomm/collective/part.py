"""The interface between the loop and the executors of one rank's part in a collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from ..transport.base import Link


class Part(ABC):
    """One rank's part in one collective, which can be repeated: :meth:`arm` it, then :meth:`advance`."""

    moved_bytes: int  # since it was armed; grows whenever anything moves
    waits_for: Tuple[int, ...] = ()  # the peers from which it waited to receive when it last slept
    # By peer, how long it has slept in all runs until that peer's bytes arrived. If it waited for several
    # peers at once, each has an equal part of that time.
    slept_s: Dict[int, float]

    @abstractmethod
    def arm(
        self,
        sequence: int,
        data: np.ndarray[Any, Any],
        source: Optional[np.ndarray[Any, Any]] = None,
    ) -> None:
        """Get ready to run with these flat contiguous arrays: the result grows in ``data``, ``source`` is
        only read. ``sequence`` is for the header.
        """

    @abstractmethod
    def disarm(self) -> None:
        """Release the caller's arrays, so that a kept execution does not keep them alive."""

    @abstractmethod
    def advance(self) -> bool:
        """Move everything that can move without waiting; return whether the collective is complete on this
        rank. Raises LinkClosed if a peer is gone, MismatchError if it is in another collective.
        """

    @abstractmethod
    def exchanged(self) -> Dict[int, Tuple[int, int]]:
        """Return, by peer, bytes sent and received since this was armed; approximate while it runs."""

    @abstractmethod
    def volume(self) -> Dict[int, Tuple[int, int]]:
        """Return, by peer, bytes that each run sends to it and receives from it. For any thread."""

    @abstractmethod
    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        """Return the links that could move if they were (readable, writable)."""
