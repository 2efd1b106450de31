"""The processes of a job, from their first connection to their end, and the members of a view. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Protocol, Sequence, Tuple

from ..config import Slot
from ..group.view import Candidate
from ..wire.messages import Message
from .actions import Seat


class Located(Protocol):
    """A rank and where it can be dialled, as it is known to the rendezvous and to other ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def host_index(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def machine(self) -> str: ...  # its identifier
    @property
    def addresses(self) -> List[Dict[str, Any]]: ...  # where it listens while the job starts


class Refusal(Exception):
    """The refusal of a process that asks to join; the text is the reason."""


class Member:
    """A process that has joined."""

    def __init__(self, connection: int, message: Message, slot: Optional[Slot], host: str) -> None:
        self.connection = connection
        self.slot = slot  # the place it was started for, if a launcher planned the job
        self.host = host
        self.hostname: str = message["hostname"]
        self.machine: str = str(message.get("machine", ""))
        self.pid: int = message["pid"]
        self.addresses: List[Dict[str, Any]] = message["addresses"]
        self.rank = -1
        self.host_index = -1
        self.local_rank = -1
        self.linked = False  # to all others
        self.left: Optional[str] = None  # the reason in its goodbye message
        self.gone: Optional[str] = None  # how it ended, if it failed
        self.dead_after_s = dead_after_s(message)  # limit for unanswered pings; 0: none
        self.heard_s = 0.0  # its last message, on the rendezvous' monotonic clock
        self.asked = False  # for the peers it receives heartbeats from, without an answer so far
        self.number = -1  # member number in an elastic job

    @property
    def is_here(self) -> bool:
        """Return whether it has neither left nor ended."""
        return self.left is None and self.gone is None

    def name(self) -> str:
        """Return the member as text, such as ``rank 2 (jetson2)``."""
        return f"rank {self.rank} ({self.host})" if self.rank >= 0 else f"a rank on {self.host}"

    def describe(self) -> Dict[str, Any]:
        """Return the description of this rank that is sent to every other."""
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
    """Return how long a process that asks to join may leave pings unanswered, in seconds; 0: no limit."""
    limit_s = message.get("dead_after", 0.0)
    return float(limit_s) if isinstance(limit_s, (int, float)) else 0.0


def checked_host(message: Message, version: str) -> str:
    """Return the host's name of a process that asks to join; raises Refusal if its ``version`` differs."""
    host = str(message.get("host") or message["hostname"])
    if message["version"] != version:
        raise Refusal(
            f"{host} has ringcomm {message['version']}, but this job runs {version}. "
            "Install the same on every host, from the same folder or wheel."
        )
    return host


def as_target(member: Located, addresses: Optional[Collection[str]] = None) -> Dict[str, Any]:
    """Return what another rank needs to dial this one. ``addresses``: only these; None: all."""
    offers = [item for item in member.addresses if addresses is None or item["address"] in addresses]
    return {"rank": member.rank, "addresses": offers, "machine": member.machine}


def number_hosts(ordered: Sequence[Member], planned: bool) -> None:
    """Set every member's host index and local rank. ``planned``: slots say which members share a host."""
    hosts: Dict[Any, int] = {}
    counts: Dict[int, int] = {}
    for member in ordered:
        identity: Any = (
            member.slot.host_index if planned and member.slot else (member.hostname, member.machine)
        )
        member.host_index = hosts.setdefault(identity, len(hosts))
        member.local_rank = counts.get(member.host_index, 0)
        counts[member.host_index] = member.local_rank + 1


def named_twice(members: Sequence[Member]) -> str:
    """Return a warning if the job's plan has one machine as several hosts; else ""."""
    found: Dict[Tuple[str, str], Dict[int, str]] = {}
    for member in members:
        if member.machine:
            found.setdefault((member.hostname, member.machine), {})[member.host_index] = member.host
    for (hostname, _), hosts in found.items():
        if len(hosts) > 1:
            names = sorted(hosts.values())
            count = sum(member.host_index in hosts for member in members)
            return (
                f"{' and '.join(names)} are names of one machine ({hostname}), and count as {len(hosts)} "
                "hosts: local_rank() begins at 0 for each, so their ranks choose the same GPUs and cores. "
                f"Name it once: -H {names[0]}:{count}."
            )
    return ""


class Stage(Enum):
    """The state of a process."""

    WAITING = "waits for the next view"
    IN_VIEW = "is a member of the last view"
    LEFT = "has left without an error"
    LOST = "is lost"


class Process:
    """One process of a job. Times are on the rendezvous' monotonic clock."""

    def __init__(self, number: int, connection: int, place: Optional[Seat], message: Message) -> None:
        self.number = number
        self.connection = connection
        self.place = place  # where its launcher has started it, if one did
        self.message = message  # its last request to join
        self._stage = Stage.WAITING
        self._listed: Optional[Dict[Stage, Dict[int, Process]]] = None
        self.rank = -1  # in the last view that it was in
        self.asked_s = self.heard_s = 0.0  # its first request to join, and its last message
        self.excluded: Optional[str] = None  # why it must leave at the next boundary
        self.why_lost = ""

    @property
    def stage(self) -> Stage:
        """Return its stage."""
        return self._stage

    @stage.setter
    def stage(self, stage: Stage) -> None:
        """Change its stage."""
        if self._listed is not None:
            self._listed[self._stage].pop(self.number, None)
            self._listed[stage][self.number] = self
        self._stage = stage

    def list_in(self, stages: Optional[Dict[Stage, Dict[int, Process]]]) -> None:
        """Be listed by stage from now on; None: no longer."""
        if self._listed is not None:
            self._listed[self._stage].pop(self.number, None)
        self._listed = stages
        self.stage = self._stage

    @property
    def host(self) -> str:
        """The name of its host."""
        host = self.place.host if self.place is not None else self.message.get("host")
        return str(host or self.message["hostname"])

    @property
    def is_here(self) -> bool:
        """Return whether it waits for the next view, or is a member of the last."""
        return self._stage in (Stage.WAITING, Stage.IN_VIEW)

    @property
    def is_new(self) -> bool:
        """Return whether it has never been in a view."""
        return self.rank < 0

    @property
    def dead_after_s(self) -> float:
        """Return how long it may leave pings unanswered, in seconds; 0: no limit."""
        return dead_after_s(self.message)

    def candidate(self) -> Candidate:
        """Return this process as a candidate for the next view."""
        position = self.message.get("position", 0)
        slot = Slot(0, 0) if self.place is None else self.place.slot
        return Candidate(self.number, self.rank, position if type(position) is int else 0, slot)


class Processes:
    """All processes of a job, by member number and by connection."""

    def __init__(self, expected: Optional[Mapping[int, Seat]] = None) -> None:
        self.expected: Dict[int, Seat] = dict(expected or {})  # planned or announced places, by member number
        # how processes ended, and whether normally, by member number
        self.exits: Dict[int, Tuple[str, bool]] = {}
        self._by_number: Dict[int, Process] = {}
        self._by_connection: Dict[int, Process] = {}
        self._by_stage: Dict[Stage, Dict[int, Process]] = {stage: {} for stage in Stage}

    def at(self, connection: int) -> Optional[Process]:
        """Return the process of a connection, if it has joined on it."""
        return self._by_connection.get(connection)

    def get(self, number: int) -> Optional[Process]:
        """Return the process with a member number, if it has joined."""
        return self._by_number.get(number)

    def among(self, *stages: Stage) -> List[Process]:
        """Return the processes in these stages, by number."""
        found = [pair for stage in stages for pair in self._by_stage[stage].items()]
        return [item for _, item in sorted(found)]

    def count(self, stage: Stage) -> int:
        """Return the number of processes in this stage."""
        return len(self._by_stage[stage])

    def is_waiting(self, number: int) -> bool:
        """Return whether the process with this member number waits for the next view."""
        return number in self._by_stage[Stage.WAITING]

    def missing(self) -> List[Tuple[int, Seat]]:
        """Return the processes that a launcher has announced, and that have neither joined nor ended."""
        known = {*self._by_number, *self.exits}
        return [(number, place) for number, place in sorted(self.expected.items()) if number not in known]

    def enter(
        self, connection: int, message: Message, number: int, place: Optional[Seat], now_s: float
    ) -> Process:
        """Take in a process that may join: a new one, or a member of the last view. Returns it."""
        process = self._by_number.get(number)
        if process is None or not process.is_here:
            if process is not None:
                self.forget(process)
            process = Process(number, connection, place, message)
            process.asked_s = now_s
        self._by_connection.pop(process.connection, None)
        process.connection, process.message = connection, message
        process.stage, process.heard_s = Stage.WAITING, now_s
        self._by_connection[connection] = process
        self._by_number[number] = process
        process.list_in(self._by_stage)
        return process

    def forget(self, process: Process) -> None:
        """Remove a process: it has not been in any view, or all members of its view have left."""
        self._by_number.pop(process.number, None)
        process.list_in(None)
        self.disconnect(process)

    def disconnect(self, process: Process) -> None:
        """Forget the connection of a process, which has ended."""
        self._by_connection.pop(process.connection, None)


def names(processes: Iterable[Process]) -> str:
    """Return the processes as text: their ranks in the last view, and their hosts."""
    return ", ".join(
        f"rank {item.rank} ({item.host})" if item.rank >= 0 else f"a new process on {item.host}"
        for item in processes
    )
