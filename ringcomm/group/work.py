"""What the operation queue and the point-to-point engine of a group require of an operation."""

from __future__ import annotations

from typing import Any, Optional, Protocol

from ..collective.call_sites import Site


class Work(Protocol):
    """A collective or a point-to-point message.

    Attributes:
        what: its name, for error texts.
        waiters: the number of threads that wait for it.
        source: the sender's rank, of a received message.
        site: the place of its call in the user's program, if known.
        noted: its record and the history that has it, of a message that is recorded.
    """

    what: str
    waiters: int
    source: int
    site: Optional[Site]
    noted: Any

    def perform(self) -> None:
        """Run it, and finish it with success or its error."""

    def finish(self, error: Optional[BaseException] = None) -> None:
        """Mark it as done, or as failed with ``error``; only the first call has an effect."""

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""

    def where(self) -> str:
        """Return the place of the call, for error texts; empty if unknown."""
