"""The interface that a group's operation queue and point-to-point engine require of an operation."""

from __future__ import annotations

from typing import Any, Optional, Protocol

from ..collective.call_sites import Site


class Work(Protocol):
    """A collective or a point-to-point message."""

    what: str  # its name, for error texts
    waiters: int  # threads that wait for it
    source: int  # the sender of a received message
    site: Optional[Site]  # the place of its call in the user's program, if known
    noted: Any  # the history that records it, and its record there

    def perform(self) -> None:
        """Run it, and finish it with success or its error."""

    def finish(self, error: Optional[BaseException] = None) -> None:
        """Mark it as done, or as failed with ``error``; only the first call has an effect."""

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""

    def where(self) -> str:
        """Return the place of the call, for error texts; empty if unknown."""
