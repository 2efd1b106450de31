"""Processes that have joined but have no rank yet: the next generation, until it is complete."""

from __future__ import annotations

from typing import Collection, Dict, List, Optional, Tuple

from ..clock import is_due
from ..config import Slot
from ..wire.messages import Message
from .membership import Member, RankAssignment, Refusal
from .root_cause import RootCauseAnalysis


class PendingMembers:
    """Processes that wait until all ranks have joined.

    Args:
        ranks: assigns their ranks.
        start_timeout_s: how long the first that joined waits for the last, in seconds.
    """

    def __init__(self, ranks: RankAssignment, start_timeout_s: float) -> None:
        self._ranks = ranks
        self._start_timeout_s = start_timeout_s
        self._members: Dict[int, Member] = {}
        self._by_slot: Dict[Slot, Member] = {}
        self._since_s: Optional[float] = None

    def __contains__(self, connection: int) -> bool:
        return connection in self._members

    def __len__(self) -> int:
        return len(self._members)

    @property
    def connections(self) -> List[int]:
        """The numbers of their control connections."""
        return list(self._members)

    def admit(self, slot: Optional[Slot], host: str, present: Collection[Member], room: int) -> None:
        """Check whether a process with this slot may join.

        Args:
            slot: the place it was started for, if a launcher planned the job.
            host: the name of its host.
            present: the members of the current generation with this slot, also those that have left.
            room: how many processes may wait.

        Raises:
            Refusal: it may not.
        """
        waiting = self._by_slot.get(slot) if slot is not None else None
        for member in [*([] if waiting is None else [waiting]), *present]:
            if slot is not None and member.is_here:
                raise Refusal(
                    f"place {slot.local} on {host} is already taken by process {member.pid} on "
                    f"{member.hostname}"
                )
        if len(self._members) >= room:
            raise Refusal(f"the job's {self._ranks.size} ranks are complete; {host} came too late")

    def enter(self, connection: int, message: Message, slot: Optional[Slot], host: str, now_s: float) -> bool:
        """Add a process; return whether the start timeout begins with it."""
        member = self._members[connection] = Member(connection, message, slot, host)
        if slot is not None:
            self._by_slot[slot] = member
        return self._since_s is None and self.restart_clock(now_s)

    def restart_clock(self, now_s: float) -> bool:
        """Count the start timeout from now; return whether any process waits."""
        self._since_s = now_s if self._members else None
        return bool(self._members)

    def leave(self, connection: int) -> None:
        """Remove a process that waits no longer, if it has been here."""
        member = self._members.pop(connection, None)
        if member is not None and member.slot is not None:
            self._by_slot.pop(member.slot, None)
        if member is not None and not self._members:
            self._since_s = None

    def assign_ranks(self) -> List[Member]:
        """Assign ranks to all processes, and remove them from here.

        Returns:
            the members in rank order.

        Raises:
            Refusal: two ask for the same rank.
        """
        ordered = self._ranks.assign(list(self._members.values()))
        self._members, self._by_slot = {}, {}
        self._since_s = None
        return ordered

    def is_over(self, now_s: float) -> bool:
        """Return whether the start timeout has passed."""
        return self._since_s is not None and is_due(self._since_s + self._start_timeout_s, now_s)

    def timeout_text(self, again: bool, refused: str = "") -> Tuple[str, Optional[int]]:
        """The error text if not all ranks have joined in time, and the first planned rank that is missing.

        Args:
            again: whether the job has run before.
            refused: the connections that failed to authenticate, as text.
        """
        waiting = list(self._members.values())
        missing = self._missing()
        called = f"called ringcomm.init(){' again' if again else ''}"
        return (
            f"Only {len(waiting)} of {self._ranks.size} ranks {called} within {self._start_timeout_s:g} s. "
            f"Missing: {self._ranks.describe_missing(waiting)}. "
            "If they only need longer, raise --start-timeout (RINGCOMM_START_TIMEOUT)."
            + (f" The rendezvous turned away {refused}." if refused else ""),
            missing[0] if missing else None,
        )

    def ended_early(self, analysis: RootCauseAnalysis) -> Optional[Tuple[str, int]]:
        """The error text and the rank of a missing process that has ended already; None if there is none."""
        if not self._members or not self._ranks.seats:
            return None
        # Only the processes that have ended are looked at: this is asked whenever a rank joins.
        ended = (self._ranks.planned_rank(slot) for slot in analysis.ended if slot not in self._by_slot)
        rank = min((rank for rank in ended if rank is not None), default=None)
        if rank is None:
            return None
        seat = self._ranks.seats[rank]
        return (
            f"rank {rank} ({seat.host}) ended ({analysis.exit_of(seat.slot)}) before it called "
            f"ringcomm.init(), while {len(self._members)} of {self._ranks.size} ranks were waiting for it.",
            rank,
        )

    def _missing(self) -> List[int]:
        present = [member.slot for member in self._members.values()]
        return [rank for rank, _ in self._ranks.missing(present)]
