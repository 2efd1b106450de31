"""What runs one rank's part in a collective: the interface between the loop and the executors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from ..transport.base import Link
from .headers import Headers


class Part(ABC):
    """One rank's part in one collective, again and again: :meth:`arm` it, then :meth:`advance`.

    Attributes:
        moved_bytes: how much has moved since it was armed; grows whenever anything does.
        waits_for: the peers from which it waited to receive when it last slept.
        slept_s: by peer, how long it has slept in all runs until that peer's bytes came, in seconds. If it
            waited for several peers at once, each has an equal part of that time.
        headers: what it sends and expects in front of the bytes.
    """

    moved_bytes: int
    waits_for: Tuple[int, ...] = ()
    slept_s: Dict[int, float]
    headers: Headers

    @abstractmethod
    def arm(
        self,
        sequence: int,
        data: np.ndarray[Any, Any],
        source: Optional[np.ndarray[Any, Any]] = None,
        site: int = 0,
    ) -> None:
        """Get ready to run with these arrays.

        Args:
            sequence: number of the call, for the header.
            data: contiguous one-dimensional array in which the result grows.
            source: contiguous one-dimensional array that is only read, for schedules that have one.
            site: where the program makes the call, for the header; see :func:`~.call_sites.site_number`.
        """

    @abstractmethod
    def disarm(self) -> None:
        """Let go of the caller's arrays, so that a kept execution does not keep them alive."""

    @abstractmethod
    def advance(self) -> bool:
        """Move everything that can move without waiting.

        Returns:
            whether the collective is complete on this rank.

        Raises:
            LinkClosed: a peer is gone.
            MismatchError: a peer is in another collective.
        """

    @abstractmethod
    def exchanged(self) -> Dict[int, Tuple[int, int]]:
        """By peer, bytes sent to it and received from it since this was armed; roughly, while they move."""

    @abstractmethod
    def volume(self) -> Dict[int, Tuple[int, int]]:
        """By peer, bytes that each run sends to it and receives from it. For any thread."""

    @abstractmethod
    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        """The links that could move if they were (readable, writable)."""
