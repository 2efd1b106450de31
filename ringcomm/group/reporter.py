"""The failure reporter of ranks without a rendezvous."""

from __future__ import annotations

import logging
from typing import Callable, List, Optional, Tuple

from ..errors import (
    MismatchError,
    PeerLostError,
    PeerStalledError,
    RingcommError,
    fresh_copy,
    interruption_text,
)
from ..transport.base import Watch

logger = logging.getLogger("ringcomm")


class Reporter(Watch):
    """Reports failures, and returns the job's root cause, without a rendezvous to ask."""

    heard_and_silent: Optional[Callable[[], Tuple[List[int], List[int]]]] = None
    abort_error: Optional[RingcommError] = None
    _interruption: Optional[RingcommError] = None

    def fileno(self) -> int:
        return -1

    def check(self) -> None:
        if self.abort_error is not None:
            raise fresh_copy(self.abort_error)

    def report_lost(self, peer: int, doing: str, why: str, kind: str = "lost") -> RingcommError:
        """Report that a peer is lost, or else silent, stalled or late; return the error to raise."""
        if self.abort_error is None:
            error = PeerLostError if kind == "lost" else PeerStalledError
            during = f" while this rank was in {doing}" if doing else ""
            text = f"rank {peer} was lost{during}: {why}."
            self.abort_error = error(text, rank=peer)
        return fresh_copy(self.abort_error)

    def report_mismatch(self, peer: int, text: str) -> RingcommError:
        """Report that a peer is in a different call; return the error to raise."""
        return MismatchError(text, peer=peer)

    def note_interrupted(self, doing: str, why: str) -> RingcommError:
        """Report that this rank left a collective half-way; return an error for lack of a root cause."""
        self._interruption = self._interruption or PeerLostError(interruption_text("this rank", why, doing))
        return self._interruption

    def root_cause(self, otherwise: RingcommError) -> RingcommError:
        """Return the root cause, after a failure was reported without waiting."""
        self.abort_error = self.abort_error or otherwise
        return fresh_copy(self.abort_error)

    def note_closed(self, peer: int, why: str) -> None:
        """Report, without waiting, that a peer's link ended while no call needed that peer."""

    def warn(self, topic: str, text: str) -> None:
        """Warn the user; of one topic a job warns once."""
        logger.warning("%s", text)
