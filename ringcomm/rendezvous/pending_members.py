"""Who has joined and has no part in the job yet: the next generation, until it is complete."""

from __future__ import annotations

from typing import Collection, Dict, List, Optional, Tuple

from ..config import Slot
from ..wire.messages import Message
from .membership import Member, Refusal, Roster
from .root_cause import Blame

_ROUNDING_S = 1e-3


class WaitingRoom:
    """Those who wait for the others.

    Args:
        roster: the places.
        start_timeout_s: how long the first who came waits for the last.
    """

    def __init__(self, roster: Roster, start_timeout_s: float) -> None:
        self._roster = roster
        self._start_timeout_s = start_timeout_s
        self._members: Dict[int, Member] = {}
        self._since_s: Optional[float] = None

    def __contains__(self, connection: int) -> bool:
        return connection in self._members

    def __len__(self) -> int:
        return len(self._members)

    @property
    def connections(self) -> List[int]:
        """Of all who are here."""
        return list(self._members)

    def admit(self, slot: Optional[Slot], host: str, present: Collection[Member], room: int) -> None:
        """Whether somebody with this slot may come in.

        Args:
            present: who has a part in the job, or had one and has left.
            room: how many may wait here.

        Raises:
            Refusal: it may not.
        """
        for member in [*self._members.values(), *present]:
            here = member.left is None and member.gone is None
            if slot is not None and member.slot == slot and here:
                raise Refusal(
                    f"place {slot.local} on {host} is already taken by process {member.pid} on "
                    f"{member.hostname}"
                )
        if len(self._members) >= room:
            raise Refusal(f"the job's {self._roster.size} ranks are complete; {host} came too late")

    def enter(self, connection: int, message: Message, slot: Optional[Slot], host: str, now_s: float) -> bool:
        """Somebody waits from now on; whether the clock starts with it."""
        self._members[connection] = Member(connection, message, slot, host)
        return self._since_s is None and self.restart_clock(now_s)

    def restart_clock(self, now_s: float) -> bool:
        """Only now it makes sense to wait for the others; whether anybody does."""
        self._since_s = now_s if self._members else None
        return bool(self._members)

    def leave(self, connection: int) -> None:
        """Somebody does not wait any longer."""
        if self._members.pop(connection, None) is not None and not self._members:
            self._since_s = None

    def call_in(self) -> List[Member]:
        """All are here: with their ranks, in that order. The room is empty then.

        Raises:
            Refusal: they do not fit together.
        """
        ordered = self._roster.assign(list(self._members.values()))
        self._members = {}
        self._since_s = None
        return ordered

    def is_over(self, now_s: float) -> bool:
        """Whether the first has waited for long enough."""
        return self._since_s is not None and now_s >= self._since_s + self._start_timeout_s - _ROUNDING_S

    def giving_up(self, again: bool, turned_away: str = "") -> Tuple[str, Optional[int]]:
        """What to say if not all have come in time, and the first planned rank that is missing.

        Args:
            again: whether the job has run before.
            turned_away: how many connections could not prove themselves, in words.
        """
        waiting = list(self._members.values())
        missing = self._missing()
        called = f"called ringcomm.init(){' again' if again else ''}"
        return (
            f"Only {len(waiting)} of {self._roster.size} ranks {called} within {self._start_timeout_s:g} s. "
            f"Missing: {self._roster.who_is_missing(waiting)}. "
            "If they only need longer, raise --start-timeout (RINGCOMM_START_TIMEOUT)."
            + (f" The rendezvous turned away {turned_away}." if turned_away else ""),
            missing[0] if missing else None,
        )

    def ended_early(self, blame: Blame) -> Optional[Tuple[str, int]]:
        """If one of those who are waited for has ended already: that in words, and its rank."""
        if not self._members:
            return None
        for rank in self._missing():
            seat = self._roster.seats[rank]
            how = blame.exit_of(seat.slot)
            if how is not None:
                return (
                    f"rank {rank} ({seat.host}) ended ({how}) before it called ringcomm.init(), while "
                    f"{len(self._members)} of {self._roster.size} ranks were waiting for it.",
                    rank,
                )
        return None

    def _missing(self) -> List[int]:
        present = [member.slot for member in self._members.values()]
        return [rank for rank, _ in self._roster.missing(present)]
