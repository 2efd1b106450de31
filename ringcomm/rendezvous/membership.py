"""The members of a job: which processes may join, and which rank each of them gets."""

from __future__ import annotations

from typing import Any, Collection, Dict, List, Optional, Protocol, Sequence, Tuple

from ..config import Slot
from ..wire.messages import Message
from .actions import Seat


class Located(Protocol):
    """A rank and where it can be dialled, as it is known to the rendezvous and to other ranks."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def host(self) -> str:
        """The name of its host."""

    @property
    def host_index(self) -> int:
        """The number of its host."""

    @property
    def local_rank(self) -> int:
        """Its place on its host."""

    @property
    def machine(self) -> str:
        """What identifies its machine."""

    @property
    def addresses(self) -> List[Dict[str, Any]]:
        """Where it listens while the job starts."""


class Refusal(Exception):
    """A process may not join; the text says why."""


class Member:
    """A process that has joined.

    Attributes:
        connection: number of the control connection.
        slot: the place it was started for, if a launcher planned the job.
        host: the name of its host in messages.
        wanted: the rank it asks for, if any.
        rank, host_index, local_rank: its place in the job, once assigned.
        linked: whether it has links to all others.
        left: the reason it gave in its goodbye message.
        gone: how it ended, if it failed.
        dead_after_s: how long it may leave pings unanswered, in seconds; 0: for ever.
        heard_s: when its last message arrived, on the rendezvous' monotonic clock.
        asked: whether it has been asked from which peers it receives heartbeats, and has not answered.
        number: its member number in an elastic job; -1 in others.
    """

    def __init__(self, connection: int, message: Message, slot: Optional[Slot], host: str) -> None:
        self.connection = connection
        self.slot = slot
        self.host = host
        self.hostname: str = message["hostname"]
        self.machine: str = str(message.get("machine", ""))
        self.pid: int = message["pid"]
        self.wanted: Optional[int] = message.get("rank")
        self.addresses: List[Dict[str, Any]] = message["addresses"]
        self.rank = -1
        self.host_index = -1
        self.local_rank = -1
        self.linked = False
        self.left: Optional[str] = None
        self.gone: Optional[str] = None
        self.dead_after_s = dead_after_s(message)
        self.heard_s = 0.0
        self.asked = False
        self.number = -1

    @property
    def is_here(self) -> bool:
        """Whether it has neither left nor ended."""
        return self.left is None and self.gone is None

    def name(self) -> str:
        """The member as text, such as ``rank 2 (jetson2)``."""
        return f"rank {self.rank} ({self.host})" if self.rank >= 0 else f"a rank on {self.host}"

    def describe(self) -> Dict[str, Any]:
        """The description of this rank that is sent to every other."""
        description: Dict[str, Any] = {
            "rank": self.rank,
            "host": self.host,
            "host_index": self.host_index,
            "local_rank": self.local_rank,
            "pid": self.pid,
        }
        if self.number >= 0:
            description["member"] = self.number
        return description


def dead_after_s(message: Message) -> float:
    """Return for how long a process that asks to join may leave pings unanswered, in seconds; 0: for ever."""
    limit_s = message.get("dead_after", 0.0)
    return float(limit_s) if isinstance(limit_s, (int, float)) else 0.0


def checked_host(message: Message, version: str) -> str:
    """Return the name of the host of a process that asks to join.

    Args:
        message: its request.
        version: the job's version of ringcomm.

    Raises:
        Refusal: it has another version.
    """
    host = str(message.get("host") or message["hostname"])
    if message["version"] != version:
        raise Refusal(
            f"{host} has ringcomm {message['version']}, but this job runs {version}. "
            "Install the same on every host, from the same folder or wheel."
        )
    return host


def as_target(member: Located, addresses: Optional[Collection[str]] = None) -> Dict[str, Any]:
    """Return what another rank needs in order to dial this one.

    Args:
        member: the rank to dial.
        addresses: only these; None: all.
    """
    offers = [item for item in member.addresses if addresses is None or item["address"] in addresses]
    return {"rank": member.rank, "addresses": offers, "machine": member.machine}


class RankAssignment:
    """Assigns ranks: as a launcher has planned them, or as processes ask for them.

    Args:
        size: number of ranks.
        seats: in rank order, if a launcher planned the job.
        version: ringcomm's version; members must have the same.
    """

    def __init__(self, size: int, seats: Sequence[Seat], version: str) -> None:
        self.size = size
        self.seats = list(seats)
        self.version = version
        self._ranks = {seat.slot: rank for rank, seat in enumerate(self.seats)}

    def place(self, message: Message) -> Tuple[Optional[Slot], str]:
        """The place of a process that asks to join, and the name of its host.

        Raises:
            Refusal: it has another version, or a place that does not exist.
        """
        host = checked_host(message, self.version)
        rank = message.get("rank")
        if rank is not None and (type(rank) is not int or not 0 <= rank < self.size):
            raise Refusal(f"{host} asks for rank {rank!r}; this job has ranks 0 to {self.size - 1}")
        place = message.get("slot")
        if place is None:
            if self.seats:
                raise Refusal(
                    f"{host} (process {message['pid']}) was not started by this job's launcher, which "
                    "planned a place for every rank"
                )
            return None, host
        try:
            slot = Slot(int(place[0]), int(place[1]))
        except (TypeError, ValueError, OverflowError, IndexError, KeyError):
            raise Refusal(f"{host} names an invalid place: {place!r}") from None
        rank = self.planned_rank(slot)
        if rank is not None:
            return slot, self.seats[rank].host
        if self.seats:
            raise Refusal(
                f"{host} asks for place {slot.local} of host number {slot.host_index}, which was not planned"
            )
        return slot, host

    def slot_of(self, number: int) -> Slot:
        """Return the place of a rank; without a plan the first host has a place for each."""
        return self.seats[number].slot if self.seats else Slot(0, number)

    def planned_rank(self, slot: Slot) -> Optional[int]:
        """The rank of the process in this place, if a launcher planned it."""
        return self._ranks.get(slot)

    def assign(self, members: Sequence[Member]) -> List[Member]:
        """Give every member its rank and its place on its host; the members in rank order.

        With seats the rank is the seat's. Otherwise it is the one asked for; those that do not ask
        get the rest, ordered by hostname and process id.

        Raises:
            Refusal: two ask for the same rank.
        """
        if self.seats:
            for member in members:
                assert member.slot is not None
                member.rank = self._ranks[member.slot]
        else:
            self._deal_out(members)
        ordered = sorted(members, key=lambda member: member.rank)
        number_hosts(ordered, bool(self.seats))
        return ordered

    def _deal_out(self, members: Sequence[Member]) -> None:
        wanted: Dict[int, Member] = {}
        for member in members:
            member.rank = -1
            if member.wanted is None:
                continue
            first = wanted.setdefault(member.wanted, member)
            if first is not member:
                raise Refusal(
                    f"two processes ask for rank {member.wanted}: one on {first.host} and one on "
                    f"{member.host}. Give every process its own RINGCOMM_RANK, or none at all"
                )
            member.rank = member.wanted
        free = iter(rank for rank in range(self.size) if rank not in wanted)
        for member in sorted(members, key=_join_order):
            if member.rank < 0:
                member.rank = next(free)

    def missing(self, present: Collection[Optional[Slot]]) -> List[Tuple[int, Seat]]:
        """The planned ranks whose place no process has taken."""
        taken = set(present)
        return [(rank, seat) for rank, seat in enumerate(self.seats) if seat.slot not in taken]

    def describe_missing(self, members: Sequence[Member]) -> str:
        """The missing ranks as text; without a plan, how many are missing and which processes have joined."""
        absent = [f"rank {rank} ({seat.host})" for rank, seat in self.missing([m.slot for m in members])]
        if self.seats:
            return ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        here = ", ".join(f"{member.host} (process {member.pid})" for member in members)
        return f"{self.size - len(members)} more; these have joined: {here}"


def number_hosts(ordered: Sequence[Member], planned: bool) -> None:
    """Set every member's host index and local rank.

    Args:
        ordered: the members, in rank order.
        planned: whether a launcher planned the job, so that the slots say which members share a host.
    """
    hosts: Dict[Any, int] = {}
    counts: Dict[int, int] = {}
    for member in ordered:
        identity: Any = (
            member.slot.host_index if planned and member.slot else (member.hostname, member.machine)
        )
        member.host_index = hosts.setdefault(identity, len(hosts))
        member.local_rank = counts.get(member.host_index, 0)
        counts[member.host_index] = member.local_rank + 1


def _join_order(member: Member) -> Tuple[str, Slot, int]:
    return (member.hostname, member.slot or Slot(0, 0), member.pid)
