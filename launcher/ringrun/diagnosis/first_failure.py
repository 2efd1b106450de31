"""The first failure of a job. Pure: ends of ranks, reports and lost hosts go in, one cause comes out.

A rank that lost its peer may end before the report of that peer's death arrives. So the order of arrival
alone does not decide: the survivors' reports to the rendezvous come first.
"""

from __future__ import annotations

import signal
from typing import Dict, List, NamedTuple, Optional, Sequence, Set

NO_CODE = 255


class Exit(NamedTuple):
    """The end of a rank. `sent` is the last signal that the job sent to it, 0 if none."""

    rank: int
    code: Optional[int]
    signal: Optional[int]
    sent: int = 0

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def status(self) -> int:
        """As in a shell: the code, or 128 and the signal's number."""
        return 128 + self.signal if self.signal else self.code or 0

    def describe(self) -> str:
        """Return ``exit code 3`` or ``killed by SIGKILL``."""
        return f"killed by {signal_name(self.signal)}" if self.signal else f"exit code {self.code}"


class Complaint(NamedTuple):
    """A failure and its culprit (None: unknown) or `link`, as a rank or the rendezvous reports it."""

    rank: Optional[int]
    culprit: Optional[int]
    text: str
    link: bool = False


class Cause(NamedTuple):
    """The cause of the job's end: a rank, or a whole host, described by `how` and perhaps `detail`."""

    rank: Optional[int]
    host_index: Optional[int]
    how: str
    detail: str
    status: int
    exit: Optional[Exit] = None


class FirstFailure:
    """Collects events; :meth:`cause` and :meth:`exit_code` are derived from them."""

    def __init__(self) -> None:
        self.exits: Dict[int, Exit] = {}
        self.complaints: List[Complaint] = []
        self.lost: Dict[int, str] = {}  # by host index, the reason
        self.past: Set[int] = set()  # ranks that had ended before the last change that the job survived
        self._events: List[Cause] = []
        self._explained: List[Complaint] = []

    def exited(self, end: Exit) -> None:
        self.exits[end.rank] = end
        if not end.ok and not end.sent:
            self._events.append(Cause(end.rank, None, end.describe(), "", end.status, end))

    def complained(self, complaint: Complaint) -> None:
        """Add a rank's report of a failure to the rendezvous."""
        self.complaints.append(complaint)

    def host_lost(self, host_index: int, text: str) -> None:
        """Add the loss of a host's agent, or of the connection to it."""
        self.lost[host_index] = text
        self._events.append(Cause(None, host_index, text, "", NO_CODE))

    def survived(self) -> None:
        """Forget the failures so far: the (elastic) job continues without these ranks."""
        self.past.update(self.exits)
        self.complaints, self._explained, self._events = [], [], []
        self.lost.clear()

    def explained(self, complaints: Sequence[Complaint]) -> None:
        """Add the culprits in ranks' records, for groups of which the launcher's rendezvous has no report."""
        self._explained = list(complaints)

    @property
    def _complaints(self) -> List[Complaint]:
        return self.complaints or self._explained

    @property
    def failed(self) -> bool:
        """Whether any failure is known."""
        return bool(self._events or self.complaints)

    def secondary(self) -> Set[int]:
        """Return the ranks that failed because another did. The rendezvous names one culprit for all ranks
        (``rank`` is None then); a complaint may also come from one rank alone.
        """
        found = {item.rank for item in self._complaints if item.culprit not in (None, item.rank)}
        if None in found or self._link() is not None:
            found |= {rank for rank, end in self.exits.items() if not end.ok and rank not in self.past}
            found -= {item.culprit for item in self.complaints if item.rank is None}
        return {rank for rank in found if rank is not None}

    def _link(self) -> Optional[Complaint]:
        return next((item for item in self.complaints if item.link), None)

    def cause(self) -> Optional[Cause]:
        """Return the first failure, or None."""
        if not self.failed:
            return None
        link = self._link()
        if link is not None:
            return Cause(None, None, link.text, "", self._any_status())
        secondary = self.secondary()
        reported = [
            item.culprit for item in self._complaints
            if item.culprit is not None and item.culprit not in secondary
        ]  # fmt: skip
        first = [event for event in self._events if event.rank is None or event.rank not in secondary]
        # A failed rank that others name as the cause; then the first of the unexplained failures.
        for event in first:
            if event.rank is None or event.rank in reported or not reported:
                return event._replace(detail=self._detail(event.rank))
        if reported:
            return self._cause_of(reported[0])
        if self._events:
            event = self._events[0]
            return event._replace(detail=self._detail(event.rank))
        complaint = self.complaints[0]
        if complaint.rank is None:
            return Cause(None, None, complaint.text, "", self._any_status())
        return Cause(complaint.rank, None, "reported a failure", complaint.text, self._any_status())

    def _cause_of(self, rank: int) -> Cause:
        """Return the cause for a rank that the others blame, although it has not failed."""
        end = self.exits.get(rank)
        if end is not None and end.ok:
            how = "exit code 0, while others still needed it"
        elif end is not None and end.sent:
            how = f"still running, ended by ringrun with {signal_name(end.sent)}"
        else:
            how = end.describe() if end is not None else "still running"
        # What it would have to answer for has no code: that of a rank that suffered would mislead.
        own = end is not None and not end.ok and not end.sent
        return Cause(rank, None, how, self._detail(rank), end.status if end and own else NO_CODE, end)

    def _detail(self, rank: Optional[int]) -> str:
        """Return the rank's own complaint, or else the others' about it."""
        own = [item.text for item in self._complaints if rank is not None and item.rank == rank]
        others = [item.text for item in self._complaints if rank is not None and item.culprit == rank]
        return next(iter(own + others), "")

    def _any_status(self) -> int:
        return next((end.status for end in self.exits.values() if not end.ok and not end.sent), NO_CODE)

    def exit_code(self) -> int:
        """Return the launcher's exit code: the first failed rank's, 0 if none failed."""
        cause = self.cause()
        return 0 if cause is None else cause.status or NO_CODE


def signal_name(number: Optional[int]) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 2`` or ``ranks 0, 2-5``."""
    runs: List[List[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)
