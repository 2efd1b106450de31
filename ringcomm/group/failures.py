"""The protocol by which a rank reports failures and learns the root cause."""

from __future__ import annotations

from typing import Callable, List, Optional, Protocol, Tuple

from ..errors import RingcommError

HeardFrom = Callable[[], Tuple[List[int], List[int]]]
"""Returns the ranks with and without recent heartbeats."""


class FailureReporter(Protocol):
    """Where the parts of a rank report failures, and get the common root cause."""

    @property
    def heard_and_silent(self) -> Optional[HeardFrom]:
        """Called when the rendezvous asks from which peers heartbeats arrive."""

    @heard_and_silent.setter
    def heard_and_silent(self, ask: Optional[HeardFrom]) -> None:
        """Set the function to ask; None: there is none."""

    @property
    def abort_error(self) -> Optional[RingcommError]:
        """The root cause that the epoch was aborted with; None while it runs."""

    def report_lost(self, peer: int, doing: str, why: str, kind: str = "lost") -> RingcommError:
        """Report that a peer is lost; return the error that every rank will raise."""

    def report_mismatch(self, peer: int, text: str) -> RingcommError:
        """Report that a peer is in a different call; return the error that every rank will raise."""

    def note_closed(self, peer: int, why: str) -> None:
        """Report, without waiting, that a link ended while it was not in use."""

    def note_interrupted(self, doing: str, why: str) -> RingcommError:
        """Report, without waiting, that this rank has left a collective half-way."""

    def root_cause(self, otherwise: RingcommError) -> RingcommError:
        """Wait for the root cause after a failure was reported without waiting."""

    def warn(self, topic: str, text: str) -> None:
        """Warn the user, once for each topic."""
