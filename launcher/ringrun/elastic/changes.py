"""The lines that report how the ranks of an elastic job change. Pure."""

from __future__ import annotations

import re
from typing import Any, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

_IN_SHORT = re.compile(r"uncaught [^\n]*|no heartbeat for [\d.]+ s|no answer for [\d.]+ s")
"""The part of a root cause for a line."""


class Change(NamedTuple):
    """A view that the rendezvous has published, and its differences from the previous view."""

    members: Tuple[int, ...]  # by rank
    lost: Tuple[int, ...] = ()
    joined: Tuple[int, ...] = ()
    left: Tuple[int, ...] = ()
    pause_s: float = 0.0  # from the failure, or from the last step, to this view


def change_of(detail: Mapping[str, Any]) -> Change:
    """Return the change in the facts of the rendezvous' ``view`` notice."""
    rows = sorted(detail["members"], key=lambda row: int(row["rank"]))
    return Change(
        tuple(int(row["member"]) for row in rows), tuple(detail["lost"]),
        tuple(detail["joined"]), tuple(detail["left"]), float(detail["pause_s"]),
    )  # fmt: skip


ENDS_WITHIN_S = 2.0
"""Seconds that the line about a view waits for the ends of its lost processes."""


class ChangeLog:
    """Makes a line of every change, and keeps all of them in `lines` as (seconds since the start, text).

    The end of a process is known later than the loss of its rank. So the line for a member that was not asked
    to leave waits until its process has ended. `excluded` has the hosts and slots whose exclusions are among
    the lines.
    """

    def __init__(self, began_s: float) -> None:
        self.lines: List[Tuple[float, str]] = []
        self.excluded: List[str] = []
        self._excluded_because: Dict[str, str] = {}
        self._began_s = began_s
        self._places: Dict[int, Tuple[str, int]] = {}  # by member, host and slot
        self._used: Set[Tuple[str, int]] = set()  # places of which a process has been a rank
        self._ranks: Dict[int, int] = {}  # by member, its rank in the last view that had it
        self._reports: Dict[int, str] = {}  # by member, why the rendezvous has declared it lost
        self._exits: Dict[int, str] = {}  # by member, how its process failed without a signal of the job
        self._asked: Set[int] = set()
        self._members: Optional[Tuple[int, ...]] = None  # of the last view
        # A view, and the members that are to end first: the line says how they ended.
        self._waiting: Optional[Tuple[Change, Set[int]]] = None
        self._until_s = 0.0

    def start(self, member: int, host: str, local: int) -> None:
        """Note the place of a process that is being started."""
        self._places[member] = (host, local)

    def ask(self, member: int) -> None:
        """Note that the job has asked a member to leave."""
        self._asked.add(member)

    def report(self, member: int, why: str) -> None:
        """Note why a member was declared lost, or its process is ended; the first reason counts."""
        self._reports.setdefault(member, why)

    def fail(self, member: int, how: str) -> None:
        """Note how a process failed without a signal of the job."""
        self._exits[member] = how

    def exclude(self, place: str, why: str, now_s: float) -> None:
        """Note an exclusion of a host or slot; repeated failures for the same reason are one line."""
        if self._excluded_because.get(place) != why:
            self._excluded_because[place] = why
            self.excluded.append(place)
            self.lines.append((now_s - self._began_s, f"{place} is excluded: {why}"))

    def publish(self, change: Change, running: Container[int], now_s: float) -> List[str]:
        """Take a view that the rendezvous has published, and return the lines that can be shown now."""
        lines = self._conclude(now_s)
        if self._members is None:
            self._join(change)
            return lines
        # The last view that was reported counts: one that failed at once may be between them.
        before, now = set(self._members), set(change.members)
        change = change._replace(
            lost=tuple(sorted(before - now - set(change.left))),
            left=tuple(sorted((before - now) & set(change.left))),
            joined=tuple(member for member in change.members if member not in before),
        )  # fmt: skip
        open_ends = {member for member in before - now if member in running and member not in self._asked}
        self._waiting, self._until_s = (change, open_ends), now_s + ENDS_WITHIN_S
        return lines if open_ends else lines + self._conclude(now_s)

    @property
    def due_s(self) -> Optional[float]:
        """The next time for :meth:`tick`; None: not before another event."""
        return None if self._waiting is None else self._until_s

    def tick(self, now_s: float) -> List[str]:
        """Return the lines that have waited long enough: a disconnected host does not report ends."""
        return self._conclude(now_s) if self._waiting is not None and now_s >= self._until_s else []

    def end(self, member: int, now_s: float) -> List[str]:
        """Note the end of a process, and return the lines that waited for it."""
        if self._waiting is None:
            return []
        self._waiting[1].discard(member)
        return [] if self._waiting[1] else self._conclude(now_s)

    def _conclude(self, now_s: float) -> List[str]:
        if self._waiting is None:
            return []
        change, self._waiting = self._waiting[0], None
        lines = self._describe(change)
        self.lines += [(now_s - self._began_s, line) for line in lines]
        self._join(change)
        return lines

    def _join(self, change: Change) -> None:
        self._used |= {self._places[member] for member in change.joined if member in self._places}
        self._ranks.update({member: rank for rank, member in enumerate(change.members)})
        self._members = change.members

    def _describe(self, change: Change) -> List[str]:
        gone = [*change.lost, *change.left]
        lost = [
            member for member in gone
            if member in self._exits or (member in change.lost and member not in self._asked)
        ]  # fmt: skip
        left = [member for member in gone if member not in lost]
        size = _count(len(change.members))
        lines: List[str] = []
        if lost:
            lost.sort(key=lambda member: self._ranks.get(member, member))
            parts = [f"{self._name(member)} lost: {self._cause(member)}" for member in lost]
            lines.append(f"{'; '.join(parts)}; going on with {size} after {change.pause_s:.1f} s")
        if left:
            lines.append(f"{self._hosts(left)} left: {size}")
        for word, again in (("joined again", True), ("joined", False)):
            members = [item for item in change.joined if (self._places.get(item) in self._used) is again]
            if members:
                lines.append(f"{self._hosts(members)} {word}: {size}")
        return lines

    def _cause(self, member: int) -> str:
        """Return why a member was lost, in a few words."""
        report = self._reports.get(member, "no connection")
        found = _IN_SHORT.search(report)
        if found is not None and (member not in self._exits or found[0].startswith("uncaught")):
            return found[0].rstrip(".")
        return self._exits.get(member) or report.rstrip(".")

    def _name(self, member: int) -> str:
        host = self._places.get(member, ("?", 0))[0]
        return f"rank {self._ranks[member]} ({host})" if member in self._ranks else f"a process ({host})"

    def _hosts(self, members: Sequence[int]) -> str:
        """Return the hosts of members, with their number of members unless it is one."""
        counts: Dict[str, int] = {}
        for member in members:
            name = self._places.get(member, ("?", 0))[0]
            counts[name] = counts.get(name, 0) + 1
        return ", ".join(
            name if count == 1 else f"{name} ({_count(count)})" for name, count in counts.items()
        )


def _count(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def describe_history(changes: Sequence[Tuple[float, str]], most: int = 40) -> str:
    """Return the paragraph at the end of a job: every change with the time since the start, of more than
    `most` lines without the middle.
    """
    lines = [f"{_clock(at_s)}  {text}" for at_s, text in changes]
    if len(lines) > most:
        half = most // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half} changes left out …", *lines[-half:]]
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
