"""The terms of a job of fixed size: all ranks are in every view, and the loss of one ends the job. Pure."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

from ..clock import is_due
from ..config import Slot
from ..group.view import NO_VIEW, View
from ..wire.messages import Message
from .actions import Action, Drop, Notice, Seat, Timer, refuse
from .membership import Refusal, checked_host
from .processes import Process, Processes, Stage
from .root_cause import EVIDENCE_S, SETTLE_S
from .terms import Decision, Step, Terms


class FixedTerms(Terms):
    """A launcher has planned a place for every rank, or processes come on their own.

    When all ranks have left without an error, they may join again for the next view. If a launcher planned
    the job (``seats``, in rank order), a rank is its process's member number. ``start_timeout_s`` counts from
    the first rank that joined.
    """

    def __init__(self, size: int, seats: Sequence[Seat], version: str, start_timeout_s: float) -> None:
        self.processes = Processes(dict(enumerate(seats)))
        self.most = size
        self.is_planned = bool(seats)
        self.evidence_s = EVIDENCE_S if seats else SETTLE_S
        self._seats = list(seats)
        self._numbers: Dict[Slot, int] = {seat.slot: rank for rank, seat in enumerate(seats)}
        self._given = -1
        self._version = version
        self._start_timeout_s = start_timeout_s
        self._since_s: Optional[float] = None

    # ---- joining -----------------------------------------------------------------------------

    def admit(self, message: Message) -> Tuple[int, Optional[Seat]]:
        """Return the member number and place; see :meth:`.Terms.admit`."""
        seat, host = self.place(message)
        number = None if seat is None else self._numbers.get(seat.slot)
        holder = None if number is None else self.processes.get(number)
        if seat is not None and holder is not None and holder.is_here:
            raise Refusal(
                f"place {seat.slot.local} on {host} is already taken by process {holder.message['pid']} on "
                f"{holder.message['hostname']}"
            )
        # Only ranks that have left may join again, for the next view.
        count = self.processes.count
        if count(Stage.WAITING) >= self.most - count(Stage.IN_VIEW) - count(Stage.LOST):
            raise Refusal(f"the job's {self.most} ranks are complete; {host} came too late")
        if number is None:
            self._given += 1
            number = self._given
            if seat is not None:
                self._numbers[seat.slot] = number
        return number, seat

    def place(self, message: Message) -> Tuple[Optional[Seat], str]:
        """Return the place of a process that asks to join, if it has one, and the name of its host. Raises
        Refusal for another version, or a place that does not exist.
        """
        host = checked_host(message, self._version)
        rank = message.get("rank")
        if rank is not None and (type(rank) is not int or not 0 <= rank < self.most):
            raise Refusal(f"{host} asks for rank {rank!r}; this job has ranks 0 to {self.most - 1}")
        place = message.get("slot")
        if place is None:
            if self._seats:
                raise Refusal(
                    f"{host} (process {message['pid']}) was not started by this job's launcher, which "
                    "planned a place for every rank"
                )
            return None, host
        try:
            slot = Slot(int(place[0]), int(place[1]))
        except (TypeError, ValueError, OverflowError, IndexError, KeyError):
            raise Refusal(f"{host} names an invalid place: {place!r}") from None
        if not self._seats:
            return Seat(slot, host), host
        number = self._numbers.get(slot)
        if number is None:
            raise Refusal(
                f"{host} asks for place {slot.local} of host number {slot.host_index}, which was not planned"
            )
        return self._seats[number], self._seats[number].host

    def welcome(self, process: Process) -> List[Action]:
        """Report it; see :meth:`.Terms.welcome`."""
        waiting = self.processes.count(Stage.WAITING)
        return [Notice("joined", f"{waiting} of {self.most} ranks have joined (newest: {process.host})")]

    def number_of(self, reported: int) -> int:
        """Return the member number of a rank: its own if it was planned; see :meth:`.Terms.number_of`."""
        return reported if self._seats else self._numbers.get(Slot(0, reported), -1)

    def slot_of(self, reported: int) -> Optional[Slot]:
        """Return the place of a rank; without a plan the first host has a place for each."""
        return self._seats[reported].slot if self._seats else Slot(0, reported)

    def too_late(
        self, connection: int, message: Message, abort: Message, had_started: bool
    ) -> List[Action]:
        """Answer a process after the job has failed; see :meth:`.Terms.too_late`."""
        try:
            self.place(message)
        except Refusal as refusal:
            return refuse(connection, str(refusal))
        if not had_started:
            # It is too late for this job, but reports the same error as all other ranks.
            return super().too_late(connection, message, abort, had_started)
        if not self._seats:
            # The next job of these ranks is served by another rendezvous, which it finds if it tries again.
            return [Drop(connection)]
        return refuse(
            connection,
            "this job has failed, and init() cannot start it again: ringrun starts new processes if it is "
            f"called with --restarts N. The failure was: {abort['text']}",
        )

    # ---- the next view -----------------------------------------------------------------------

    def decide(self, last: View, refused_connections: str, now_s: float) -> Decision:
        """Decide whether all ranks are here; see :meth:`.Terms.decide`."""
        count = self.processes.count(Stage.WAITING)
        if not count:
            self._since_s = None
            return Decision(Step.WAIT)
        is_new = self._since_s is None
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        ended = self._ended_early(count)
        if ended is not None:
            return ended
        if count == self.most:
            return self._complete()
        if is_due(since_s + self._start_timeout_s, now_s):
            return self._timeout(last is not NO_VIEW, refused_connections)
        return Decision(Step.WAIT, size=count, is_new=is_new)

    def wait(self, decision: Decision, last: View) -> List[Action]:
        """Wait for the start timeout."""
        return [Timer(self._start_timeout_s)]

    def _ended_early(self, waiting: int) -> Optional[Decision]:
        """Fail if ranks wait for a process that has ended already."""
        if not self._seats:
            return None
        # Only the processes that have ended are looked at: this is asked whenever a rank joins.
        exits, is_waiting = self.processes.exits, self.processes.is_waiting
        rank = min((rank for rank in exits if not is_waiting(rank)), default=None)
        if rank is None:
            return None
        text = (
            f"rank {rank} ({self._seats[rank].host}) ended ({exits[rank][0]}) before it called "
            f"ringcomm.init(), while {waiting} of {self.most} ranks were waiting for it."
        )
        return Decision(Step.FAIL, text=text, kind="startup", culprit=rank)

    def _complete(self) -> Decision:
        try:
            order = self.assign(self.processes.among(Stage.WAITING))
        except Refusal as refusal:
            return Decision(Step.FAIL, text=f"The job cannot start: {refusal}.", kind="startup")
        self._since_s = None
        return Decision(Step.PUBLISH, order)

    def assign(self, processes: Sequence[Process]) -> Tuple[int, ...]:
        """Return the member numbers of all processes in rank order: by seat, or else by requested rank, the
        others by hostname and process id. Raises Refusal if two ask for the same rank.
        """
        if self._seats:
            return tuple(sorted(process.number for process in processes))
        wanted: Dict[int, Process] = {}
        others: List[Process] = []
        for process in processes:
            rank = process.message.get("rank")
            first = process if rank is None else wanted.setdefault(rank, process)
            if rank is None:
                others.append(process)
            elif first is not process:
                raise Refusal(
                    f"two processes ask for rank {rank}: one on {first.host} and one on {process.host}. "
                    "Give every process its own RINGCOMM_RANK, or none at all"
                )
        rest = iter(sorted(others, key=_join_order))
        return tuple((wanted.get(rank) or next(rest)).number for rank in range(len(processes)))

    def _timeout(self, again: bool, refused_connections: str) -> Decision:
        waiting = self.processes.among(Stage.WAITING)
        absent = [rank for rank in range(len(self._seats)) if not self.processes.is_waiting(rank)]
        text = (
            f"Only {len(waiting)} of {self.most} ranks called ringcomm.init(){' again' if again else ''} "
            f"within {self._start_timeout_s:g} s. Missing: {self.describe_missing(waiting, absent)}. "
            "If they only need longer, raise --start-timeout (RINGCOMM_START_TIMEOUT)."
        )
        if refused_connections:
            text += f" The rendezvous turned away {refused_connections}."
        return Decision(Step.FAIL, text=text, kind="timeout", culprit=absent[0] if absent else None)

    def describe_missing(self, waiting: Sequence[Process], absent: Sequence[int]) -> str:
        """Return the missing ranks as text; without a plan, their number and the ranks that have joined."""
        if self._seats:
            names = [f"rank {rank} ({self._seats[rank].host})" for rank in absent[:8]]
            return ", ".join(names) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        here = ", ".join(f"{item.host} (process {item.message['pid']})" for item in waiting)
        return f"{self.most - len(waiting)} more; these have joined: {here}"


def _join_order(process: Process) -> Tuple[str, Slot, int]:
    slot = Slot(0, 0) if process.place is None else process.place.slot
    return process.message["hostname"], slot, process.message["pid"]
