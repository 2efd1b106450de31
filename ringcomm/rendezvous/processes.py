"""The processes of a job, from their first connection to their end."""

from __future__ import annotations

from enum import Enum
from typing import Dict, Iterable, List, Mapping, Optional, Tuple

from ..config import Slot
from ..group.view import Candidate
from ..wire.messages import Message
from .actions import Seat
from .membership import dead_after_s


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

    @property
    def some_are_missing(self) -> bool:
        """Return whether :meth:`missing` surely has some; False where it would have to look."""
        return len(self.expected) > len(self._by_number) + len(self.exits)

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
