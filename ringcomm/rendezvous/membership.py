"""The processes of a job from their first connection to their end, and the state machine's actions. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..config import Slot
from ..group.view import Candidate
from ..wire.messages import Message

ADDED, REMOVED = 2, 1
"""Changes of the membership, as bits: as in Horovod's ``HostUpdateResult``."""


class Seat(NamedTuple):
    """A place in the job that a process is expected to take."""

    slot: Slot
    host: str


# ---- actions that the state machine returns to its I/O shell ----------------------------------


class Send(NamedTuple):
    """Send a message to a connection."""

    connection: int
    message: Message


class Drop(NamedTuple):
    """Close a connection once all messages for it have been sent."""

    connection: int


class Notice(NamedTuple):
    """Report an event to the launcher (or the log)."""

    # ``joined``, ``started``, ``failed``, ``refused``, ``note``, ``warning``, ``log`` or ``ended``; in an
    # elastic job also ``waiting``, ``view`` and ``lost``.
    kind: str
    text: str  # one paragraph for people
    rank: Optional[int] = None  # the rank it came from
    culprit: Optional[int] = None  # for ``failed``: the rank at fault, if known
    detail: Dict[str, Any] = {}  # for ``started`` the rows of the link table, for ``warning`` its topic


class Timer(NamedTuple):
    """Call :meth:`~ringcomm.rendezvous.state.Rendezvous.tick` after this many seconds."""

    delay_s: float


Action = Union[Send, Drop, Notice, Timer]


def exclude(connection: int, reason: str) -> List[Action]:
    """Make a process of an elastic job end without an error."""
    return [Send(connection, {"type": "excluded", "reason": reason}), Drop(connection)]


def refuse(connection: int, reason: str) -> List[Action]:
    """Refuse a process that has asked to join."""
    return [
        Send(connection, {"type": "refused", "reason": reason}),
        Drop(connection),
        Notice("refused", f"refused a process that asked to join: {reason}"),
    ]


class Refusal(Exception):
    """The refusal of a process that asks to join; the text is the reason."""


# ---- members of a view -------------------------------------------------------------------------


class Located(NamedTuple):
    """A rank and where it can be dialled, as other ranks see it."""

    rank: int
    host: str
    host_index: int
    local_rank: int
    machine: str  # its identifier
    addresses: List[Dict[str, Any]]  # where it listens while the job starts


def as_target(peer: Located, addresses: Optional[Iterable[str]] = None) -> Dict[str, Any]:
    """Return what another rank needs to dial this one. ``addresses``: only these; None: all."""
    offers = [item for item in peer.addresses if addresses is None or item["address"] in addresses]
    return {"rank": peer.rank, "addresses": offers, "machine": peer.machine}


class Member:
    """A rank of a view."""

    def __init__(self, connection: int, message: Message, host: str, number: int = -1) -> None:
        self.connection = connection
        self.number = number  # of the process; in a job that a launcher planned its rank
        self.host = host
        self.hostname: str = message["hostname"]
        self.machine: str = str(message.get("machine", ""))
        self.pid: int = message["pid"]
        self.addresses: List[Dict[str, Any]] = message["addresses"]
        self.rank = self.host_index = self.local_rank = -1
        self.linked = False  # to all others
        self.left: Optional[str] = None  # the reason in its goodbye message
        self.gone: Optional[str] = None  # how it ended, if it failed
        self.dead_after_s = dead_after_s(message)  # limit for unanswered pings; 0: none
        self.heard_s = 0.0  # its last message, on the rendezvous' monotonic clock
        self.asked = False  # for the peers it receives heartbeats from, without an answer so far

    @property
    def is_here(self) -> bool:
        """Return whether it has neither left nor ended."""
        return self.left is None and self.gone is None

    @property
    def located(self) -> Located:
        """Return where it can be dialled."""
        return Located(self.rank, self.host, self.host_index, self.local_rank, self.machine, self.addresses)

    def name(self) -> str:
        """Return the member as text, such as ``rank 2 (jetson2)``."""
        return f"rank {self.rank} ({self.host})"

    def describe(self) -> Dict[str, Any]:
        """Return the description of this rank that is sent to every other."""
        names = ("rank", "host", "host_index", "local_rank", "pid")
        return {**{name: getattr(self, name) for name in names}, "member": self.number}


def dead_after_s(message: Message) -> float:
    """Return how long a process that asks to join may leave pings unanswered, in seconds; 0: no limit."""
    limit_s = message.get("dead_after", 0.0)
    return float(limit_s) if isinstance(limit_s, (int, float)) else 0.0


def number_hosts(ordered: Sequence[Member], slots: Sequence[Optional[Slot]]) -> None:
    """Set every member's host index and local rank. Slots, where given, say which members share a host."""
    hosts: Dict[Any, int] = {}
    counts: Dict[int, int] = {}
    for member, slot in zip(ordered, slots):
        identity: Any = (member.hostname, member.machine) if slot is None else slot.host_index
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


# ---- processes ---------------------------------------------------------------------------------


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
        self.stage = Stage.WAITING  # changed by :meth:`Processes.move`
        self.rank = -1  # in the last view that it was in
        self.asked_s = self.heard_s = 0.0  # its first request to join, and its last message
        self.excluded: Optional[str] = None  # why it must leave at the next boundary
        self.why_lost = ""

    @property
    def host(self) -> str:
        """The name of its host."""
        host = self.place.host if self.place is not None else self.message.get("host")
        return str(host or self.message["hostname"])

    @property
    def is_here(self) -> bool:
        """Return whether it waits for the next view, or is a member of the last."""
        return self.stage in (Stage.WAITING, Stage.IN_VIEW)

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

    def name(self) -> str:
        """Return the process as text: its rank in the last view, and its host."""
        return f"a new process on {self.host}" if self.is_new else f"rank {self.rank} ({self.host})"


class Processes:
    """All processes of a job, by member number, by connection and by stage."""

    def __init__(self, expected: Mapping[int, Seat]) -> None:
        self.expected = dict(expected)  # planned or announced places, by member number
        self.exits: Dict[int, Tuple[str, bool]] = {}  # how processes ended, and whether normally, by number
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

    def missing(self) -> List[Seat]:
        """Return the places of processes that a launcher has announced, and that have not joined or ended."""
        known = {*self._by_number, *self.exits}
        return [place for number, place in sorted(self.expected.items()) if number not in known]

    def enter(
        self, connection: int, message: Message, number: int, place: Optional[Seat], now_s: float
    ) -> Process:
        """Take in a process that may join: a new one, or a member of the last view. Returns it."""
        process = self._by_number.get(number)
        if process is None or not process.is_here:
            if process is not None:
                self.forget(process)
            process = self._by_number[number] = Process(number, connection, place, message)
            process.asked_s = now_s
        self._by_connection.pop(process.connection, None)
        process.connection, process.message, process.heard_s = connection, message, now_s
        self._by_connection[connection] = process
        self.move(process, Stage.WAITING)
        return process

    def move(self, process: Process, stage: Stage, why_lost: str = "") -> None:
        """Change the stage of a process."""
        self._by_stage[process.stage].pop(process.number, None)
        process.stage, process.why_lost = stage, why_lost
        self._by_stage[stage][process.number] = process

    def forget(self, process: Process) -> None:
        """Remove a process: it has not been in any view, or all members of its view have left."""
        self._by_number.pop(process.number, None)
        self._by_stage[process.stage].pop(process.number, None)
        self.disconnect(process)

    def disconnect(self, process: Process) -> None:
        """Forget the connection of a process, which has ended."""
        self._by_connection.pop(process.connection, None)
