"""What can end the waits of a group: the rendezvous' verdict, or ``abort()``."""

from __future__ import annotations

from typing import Any, Optional, Sequence, TypeVar

from ...collective.runner import Reporter
from ...errors import RingcommError, fresh_copy
from ...transport.base import Watch

_Error = TypeVar("_Error", bound=BaseException)


class GroupWatch(Watch):
    """Watches a group's control connection, and reports on it in the whole job's numbering of ranks.

    Args:
        control: the connection to the rendezvous; None for a group of one.
        ranks: the ranks of the whole job that the group consists of.

    Attributes:
        failure: what ended the group, once something has.
    """

    def __init__(self, control: Any, ranks: Sequence[int]) -> None:
        self.failure: Optional[RingcommError] = None
        self._control = control
        self._reporter = control if control is not None else Reporter()
        self._ranks = tuple(ranks)
        self._aborted: Optional[RingcommError] = None

    def abort(self, error: RingcommError) -> None:
        """Let every wait end with this error, from now on."""
        self._aborted = error

    def fileno(self) -> int:
        """The control connection's."""
        return -1 if self._control is None else int(self._control.fileno())

    def check(self) -> None:
        """Raise what ended the group, if something has."""
        if self._aborted is not None:
            raise self._aborted
        if self._control is not None:
            try:
                self._control.check()
            except RingcommError as error:
                raise self._noted(error) from None

    @property
    def verdict(self) -> Optional[RingcommError]:
        """How the rendezvous says that the group has ended, once it has."""
        verdict: Optional[RingcommError] = self._reporter.verdict
        return None if verdict is None else self._noted(fresh_copy(verdict))

    def report_lost(self, peer: int, doing: str, why: str, kind: str = "lost") -> RingcommError:
        """A peer is lost: the error that all ranks raise."""
        return self._aborted or self._noted(self._reporter.report_lost(peer, doing, why, kind))

    def report_mismatch(self, peer: int, text: str) -> RingcommError:
        """A peer is in another call: the error that all ranks raise."""
        return self._noted(self._reporter.report_mismatch(peer, text))

    def _noted(self, error: _Error) -> _Error:
        """The same, with the culprit's rank in the whole job; its text names that one itself."""
        rank = getattr(error, "rank", None)
        if isinstance(rank, int) and 0 <= rank < len(self._ranks):
            error.rank = self._ranks[rank]  # type: ignore[attr-defined]
        if isinstance(error, RingcommError):
            self.failure = self.failure or error
        return error
