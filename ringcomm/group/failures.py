"""How a rank reports failures and learns the common root cause, with a rendezvous or without one."""

from __future__ import annotations

import logging
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

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

HeardFrom = Callable[[], Tuple[List[int], List[int]]]  # Returns the ranks with and without recent heartbeats


class Reporter(Watch):
    """Reports failures, and returns the job's root cause, without a rendezvous to ask; with one it is a
    :class:`~ringcomm.rendezvous.control.ControlChannel`.
    """

    heard_and_silent: Optional[HeardFrom] = None  # called when the rendezvous asks for heartbeats
    abort_error: Optional[RingcommError] = None  # the root cause
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


_OF_ALL_S = 1.5  # how long a group that has lost a rank waits for the root cause of the group of all ranks

_Error = TypeVar("_Error", bound=RingcommError)


class GroupWatch(Watch):
    """Watches a group's control connection, and reports on it in the whole job's numbering of ranks. A rank
    may have left this group because it lost a rank of another group: then the root cause is that of the group
    of all ranks, whose watch is ``of_all``. ``control`` is None for a group of one.
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
        return -1 if self._control is None else int(self._control.fileno())

    def check(self) -> None:
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
    def heard_and_silent(self) -> Optional[HeardFrom]:
        """The function that returns the ranks heard from and not heard from, for the rendezvous."""
        return self._reporter.heard_and_silent

    @heard_and_silent.setter
    def heard_and_silent(self, ask: Optional[HeardFrom]) -> None:
        self._reporter.heard_and_silent = ask

    @property
    def abort_error(self) -> Optional[RingcommError]:
        error: Optional[RingcommError] = self._reporter.abort_error
        return None if error is None else self._noted(error)

    def report_lost(self, peer: int, doing: str, why: str, kind: str = "lost") -> RingcommError:
        return self._aborted or self._noted(self._reporter.report_lost(peer, doing, why, kind))

    def note_closed(self, peer: int, why: str) -> None:
        self._reporter.note_closed(peer, why)

    def note_interrupted(self, doing: str, why: str) -> RingcommError:
        return self._noted(self._reporter.note_interrupted(doing, why), is_own=True)

    def root_cause(self, otherwise: RingcommError) -> RingcommError:
        in_group = {rank: place for place, rank in enumerate(self._ranks)}
        return self._aborted or self._noted(self._reporter.root_cause(_renumbered(otherwise, in_group)))

    def report_mismatch(self, peer: int, text: str) -> RingcommError:
        return self._noted(self._reporter.report_mismatch(peer, text))

    def warn(self, topic: str, text: str) -> None:
        self._reporter.warn(topic, text)

    def _noted(self, error: RingcommError, is_own: bool = False) -> RingcommError:
        """Return a copy with numbers of the whole job; ``is_own``: no earlier cause is looked for."""
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


FailureReporter = Union[Reporter, GroupWatch]
"""Where the parts of a rank report failures, and get the common root cause."""
