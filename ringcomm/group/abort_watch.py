"""Ends the waits of a group: after an abort of the rendezvous, or ``abort()``."""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, TypeVar

from ..errors import PeerLostError, RingcommError, fresh_copy
from ..transport.base import Watch
from .reporter import Reporter

_OF_ALL_S = 1.5
"""How long a group that has lost a rank waits for the root cause of the group of all ranks."""

_Error = TypeVar("_Error", bound=RingcommError)
HeardAndSilent = Callable[[], Tuple[List[int], List[int]]]


class GroupWatch(Watch):
    """Watches a group's control connection, and reports on it in the whole job's numbering of ranks.

    A rank may have left this group because it lost a rank of another group: then the root cause is that of
    the group of all ranks, whose watch is ``of_all``. ``control`` is None for a group of one.
    """

    def __init__(self, control: Any, ranks: Sequence[int], of_all: Optional[GroupWatch] = None) -> None:
        self.failure: Optional[RingcommError] = None  # what ended the group
        self._control = control
        self._reporter = control if control is not None else Reporter()
        self._ranks = tuple(ranks)
        self._of_all, self._asked = of_all, False
        self._root_cause: Optional[PeerLostError] = None
        self._aborted: Optional[RingcommError] = None

    def abort(self, error: RingcommError) -> None:
        """End every wait with this error, from now on."""
        self._aborted = error

    def fileno(self) -> int:
        """Return the control connection's file descriptor; -1 without one."""
        return -1 if self._control is None else int(self._control.fileno())

    def check(self) -> None:
        """Raise the error that ended the group, if it has ended."""
        if self._aborted is not None:
            raise self._aborted
        if self._control is not None:
            try:
                self._control.check()
            except RingcommError as error:
                raise self._noted(error) from None

    def end(self, error: RingcommError) -> None:
        """End the group on this rank, for a reason that the rendezvous does not know."""
        self.failure = self.failure or error
        if self._reporter.abort_error is None:
            self.abort(error)

    @property
    def heard_and_silent(self) -> Optional[HeardAndSilent]:
        """The function that returns the ranks heard from and not heard from, for the rendezvous."""
        return None if self._control is None else self._control.heard_and_silent

    @heard_and_silent.setter
    def heard_and_silent(self, ask: Optional[HeardAndSilent]) -> None:
        """Replace the function; None removes it."""
        if self._control is not None:
            self._control.heard_and_silent = ask

    @property
    def abort_error(self) -> Optional[RingcommError]:
        """The root cause from the rendezvous, once the group has ended."""
        error: Optional[RingcommError] = self._reporter.abort_error
        return None if error is None else self._noted(error)

    def report_lost(self, peer: int, doing: str, why: str, kind: str = "lost") -> RingcommError:
        """Report that a peer is lost; return the error that all ranks raise."""
        return self._aborted or self._noted(self._reporter.report_lost(peer, doing, why, kind))

    def note_closed(self, peer: int, why: str) -> None:
        """Report, without waiting, that a peer's link ended while no call needed that peer."""
        self._reporter.note_closed(peer, why)

    def note_interrupted(self, doing: str, why: str) -> RingcommError:
        """Report that this rank left a collective half-way; return an error for lack of a root cause."""
        return self._noted(self._reporter.note_interrupted(doing, why), is_own=True)

    def root_cause(self, otherwise: RingcommError) -> RingcommError:
        """Return the root cause, after a failure was reported without waiting."""
        in_group = {rank: place for place, rank in enumerate(self._ranks)}
        return self._aborted or self._noted(self._reporter.root_cause(_renumbered(otherwise, in_group)))

    def report_mismatch(self, peer: int, text: str) -> RingcommError:
        """Report that a peer is in another call; return the error that all ranks raise."""
        return self._noted(self._reporter.report_mismatch(peer, text))

    def warn(self, topic: str, text: str) -> None:
        """Warn the user; of one topic a group warns once."""
        self._reporter.warn(topic, text)

    def _noted(self, error: RingcommError, is_own: bool = False) -> RingcommError:
        """Return a copy with the ranks' numbers in the whole job; its text names the culprit's itself.
        ``is_own``: this rank is the cause, so that no other group can have an earlier one.
        """
        copy = _renumbered(error, dict(enumerate(self._ranks)))
        if self._of_all is not None and type(copy) is PeerLostError and not is_own:
            if not self._asked:  # once: it may wait
                self._root_cause = self._of_all.cause_of(copy)
                self._asked = True
            copy = copy if self._root_cause is None else fresh_copy(self._root_cause)
        self.failure = self.failure or copy
        return copy

    def cause_of(self, later: PeerLostError) -> Optional[PeerLostError]:
        """Return the root cause of another group's failure, if this group has lost another rank before."""
        error = None if self._control is None else self._control.await_abort(_OF_ALL_S)
        if not isinstance(error, PeerLostError) or error.rank in (None, later.rank):
            return None
        cause = _renumbered(error, dict(enumerate(self._ranks)))
        cause.args = (f"{cause} After that, in another group: {later}",)
        return cause


def _renumbered(error: _Error, numbers: Mapping[int, int]) -> _Error:
    """Return a copy of an error, which may have other users, with other numbers of ranks."""
    copy = fresh_copy(error)
    facts = vars(copy)
    for name in ("rank", "peer"):
        if facts.get(name) is not None:
            facts[name] = numbers.get(facts[name], facts[name])
    if facts.get("ranks"):
        facts["ranks"] = tuple(numbers.get(rank, rank) for rank in facts["ranks"])
    return copy
