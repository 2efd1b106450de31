"""Which processes may join a job, and when its next view has all that it needs. Pure.

In a job of fixed size all ranks are in every view. In an elastic one a view has the processes that are ready
when every member of the last one has asked or has ended.
"""

from __future__ import annotations

from enum import Enum
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..clock import is_due
from ..config import Slot
from ..configuration.limits import Limits
from ..group.view import NO_VIEW, View, rank_order
from ..wire.messages import Message
from .actions import Action, Drop, Notice, Seat, Send, Timer, refuse
from .membership import Process, Processes, Refusal, Stage, checked_host, names
from .root_cause import EVIDENCE_S, SETTLE_S
from .routing import NO_RELAY, RelayHost

START_LIMIT = "--start-timeout (RINGCOMM_START_TIMEOUT)"


class Terms(NamedTuple):
    """The terms of one job: ``limits`` of an elastic one, otherwise its size."""

    version: str  # of ringcomm; processes must have the same
    start_timeout_s: float  # since the first process has joined
    size: int = 0
    seats: Tuple[Seat, ...] = ()  # in rank order, if a launcher planned a job of fixed size
    limits: Optional[Limits] = None
    launched: bool = False  # elastic: only processes that a launcher has announced may join
    limit: str = START_LIMIT  # what sets start_timeout_s, as a user knows it
    relay: RelayHost = NO_RELAY

    @property
    def most(self) -> int:
        """Return the size of the largest view."""
        return self.size if self.limits is None else self.limits.most

    @property
    def is_elastic(self) -> bool:
        """Return whether the job continues with another view if members are lost, join or leave."""
        return self.limits is not None

    @property
    def evidence_s(self) -> float:
        """Return the time for the launcher's report after a control connection has ended."""
        return EVIDENCE_S if self.seats else SETTLE_S


class Step(Enum):
    """The kind of a decision, when no member of the last view is in it any more."""

    PUBLISH = "publish"
    WAIT = "wait"
    FAIL = "fail"
    END = "end"


class Decision(NamedTuple):
    """A decision about the next view."""

    step: Step
    order: Tuple[int, ...] = ()  # to publish: member numbers in rank order
    actions: Tuple[Action, ...] = ()  # to wait
    kind: str = ""  # to fail: the kind of failure, a text, and the rank at fault
    text: str = ""
    culprit: Optional[int] = None


class Assembly:
    """Admits processes, and decides about the next view. In a job of fixed size that a launcher planned, a
    rank is its process's member number.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.processes = Processes(dict(enumerate(terms.seats)))
        self._numbers: Dict[Slot, int] = {seat.slot: rank for rank, seat in enumerate(terms.seats)}
        self._given = -1
        self._since_s: Optional[float] = None  # when the wait for the next view began
        self._newest = 0

    # ---- joining -----------------------------------------------------------------------------

    def admit(self, message: Message) -> Tuple[int, Optional[Seat]]:
        """Return the member number and the place of a process that asks to join; raises Refusal."""
        return self._admit_member(message) if self.terms.is_elastic else self._admit_rank(message)

    def _admit_rank(self, message: Message) -> Tuple[int, Optional[Seat]]:
        seat, host = self._place(message)
        number = None if seat is None else self._numbers.get(seat.slot)
        holder = None if number is None else self.processes.get(number)
        if seat is not None and holder is not None and holder.is_here:
            raise Refusal(
                f"place {seat.slot.local} on {host} is already taken by process {holder.message['pid']} on "
                f"{holder.message['hostname']}"
            )
        # Only ranks that have left may join again, for the next view.
        count, size = self.processes.count, self.terms.size
        if count(Stage.WAITING) >= size - count(Stage.IN_VIEW) - count(Stage.LOST):
            raise Refusal(f"the job's {size} ranks are complete; {host} came too late")
        if number is None:
            self._given += 1
            number = self._given
            if seat is not None:
                self._numbers[seat.slot] = number
        return number, seat

    def _place(self, message: Message) -> Tuple[Optional[Seat], str]:
        """Return the place of a rank that asks to join, if it has one, and the name of its host. Raises
        Refusal for another version, or a place that does not exist.
        """
        host, seats = checked_host(message, self.terms.version), self.terms.seats
        rank, place = message.get("rank"), message.get("slot")
        if rank is not None and (type(rank) is not int or not 0 <= rank < self.terms.size):
            raise Refusal(f"{host} asks for rank {rank!r}; this job has ranks 0 to {self.terms.size - 1}")
        if place is None and seats:
            raise Refusal(
                f"{host} (process {message['pid']}) was not started by this job's launcher, which "
                "planned a place for every rank"
            )
        if place is None:
            return None, host
        try:
            slot = Slot(int(place[0]), int(place[1]))
        except (TypeError, ValueError, OverflowError, IndexError, KeyError):
            raise Refusal(f"{host} names an invalid place: {place!r}") from None
        if not seats:
            return Seat(slot, host), host
        if slot not in self._numbers:
            raise Refusal(
                f"{host} asks for place {slot.local} of host number {slot.host_index}, which was not planned"
            )
        seat = seats[self._numbers[slot]]
        return seat, seat.host

    def _admit_member(self, message: Message) -> Tuple[int, Optional[Seat]]:
        host = checked_host(message, self.terms.version)
        number, launched = message.get("member"), self.terms.launched
        known = self.processes.get(number) if type(number) is int else None
        if known is not None:
            _check_same(known, message)
            return known.number, known.place
        if number is None and not launched:
            self._given += 1
            while self.processes.get(self._given) is not None:  # it has asked for this number
                self._given += 1
            number = self._given
        if type(number) is not int or (launched and number not in self.processes.expected):
            raise Refusal(f"{host} (process {message['pid']}) was not started by this job's launcher")
        return number, self.processes.expected.get(number)

    def welcome(self, process: Process) -> List[Action]:
        """Report a process that has joined for the first time; in an elastic job it gets its number."""
        host, waiting = process.host, self.processes.count(Stage.WAITING)
        if not self.terms.is_elastic:
            text = f"{waiting} of {self.terms.size} ranks have joined (newest: {host})"
            return [Notice("joined", text)]
        detail = {"member": process.number, "host": host, "waiting": waiting}
        return [
            Send(process.connection, {"type": "waiting", "member": process.number}),
            Notice("joined", f"a process on {host} is ready ({waiting} waiting)", detail=detail),
        ]

    def too_late(self, connection: int, message: Message, abort: Message, started: bool) -> List[Action]:
        """Answer a process that asks to join after the job has failed. ``abort``: the message that every
        process was sent; ``started``: the ranks were connected when the job failed.
        """
        try:
            if not self.terms.is_elastic:
                self._place(message)
        except Refusal as refusal:
            return refuse(connection, str(refusal))
        if self.terms.is_elastic or not started:
            # It is too late for this job, but reports the same error as all other ranks.
            return [Send(connection, abort), Drop(connection)]
        if not self.terms.seats:
            # The next job of these ranks is served by another rendezvous, which it finds if it tries again.
            return [Drop(connection)]
        return refuse(
            connection,
            "this job has failed, and init() cannot start it again: ringrun starts new processes if it is "
            f"called with --restarts N. The failure was: {abort['text']}",
        )

    def reported(self, number: int) -> Tuple[int, Optional[Slot]]:
        """Return the member number (-1: unknown) and the place of a process, by its launcher's number: in a
        job of fixed size the rank. Without a plan the first host has a place for each; None: unknown.
        """
        if self.terms.is_elastic:
            return number, None
        if self.terms.seats:
            return number, self.terms.seats[number].slot
        return self._numbers.get(Slot(0, number), -1), Slot(0, number)

    # ---- the next view -----------------------------------------------------------------------

    def decide(self, last: View, refused_connections: str, now_s: float) -> Decision:
        """Decide, after every member of the last view has asked for the next one or has ended."""
        limits, waiting = self.terms.limits, self.processes.count(Stage.WAITING)
        may_end = limits is not None and last is not NO_VIEW
        if may_end and all(item.is_new for item in self.processes.among(Stage.WAITING)):
            return self._no_survivor(last)
        if not waiting:
            self._since_s = None
            return Decision(Step.WAIT)
        is_new = self._since_s is None
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        if limits is None:
            decision = self._with_all(waiting, last, refused_connections, now_s - since_s)
        else:
            decision = self._with_those_ready(limits, waiting, last, refused_connections, now_s - since_s)
        if decision.step is Step.PUBLISH:
            self._since_s = None
        return decision if is_new or decision.step is not Step.WAIT else Decision(Step.WAIT)

    def _with_all(self, waiting: int, last: View, refused_connections: str, waited_s: float) -> Decision:
        """Decide whether all ranks of a job of fixed size are here."""
        seats, size, start_s = self.terms.seats, self.terms.size, self.terms.start_timeout_s
        # Only the processes that have ended are looked at: this is asked whenever a rank joins.
        exits, is_waiting = self.processes.exits, self.processes.is_waiting
        ended = min((rank for rank in exits if not is_waiting(rank)), default=None) if seats else None
        if ended is not None:
            text = (
                f"rank {ended} ({seats[ended].host}) ended ({exits[ended][0]}) before it called "
                f"ringcomm.init(), while {waiting} of {size} ranks were waiting for it."
            )
            return Decision(Step.FAIL, kind="startup", text=text, culprit=ended)
        if waiting == size:
            try:
                return Decision(Step.PUBLISH, self.assign(self.processes.among(Stage.WAITING)))
            except Refusal as refusal:
                return Decision(Step.FAIL, kind="startup", text=f"The job cannot start: {refusal}.")
        if not is_due(start_s, waited_s):
            return Decision(Step.WAIT, actions=(Timer(start_s),))
        absent = [rank for rank in range(len(seats)) if not is_waiting(rank)]
        again = "" if last is NO_VIEW else " again"
        text = (
            f"Only {waiting} of {size} ranks have joined{again} within {start_s:g} s. "
            f"Missing: {self._missing(absent)}. "
            f"If they only need longer, raise {self.terms.limit}."
        )
        if refused_connections:
            text += f" The rendezvous turned away {refused_connections}."
        return Decision(Step.FAIL, kind="timeout", text=text, culprit=absent[0] if absent else None)

    def assign(self, processes: Sequence[Process]) -> Tuple[int, ...]:
        """Return the member numbers of all processes in rank order: by seat, or else by requested rank, the
        others by hostname and process id. Raises Refusal if two ask for the same rank.
        """
        if self.terms.seats:
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

    def _missing(self, absent: Sequence[int]) -> str:
        """Return the missing ranks as text; without a plan, their number and the ranks that have joined."""
        if self.terms.seats:
            text = ", ".join(f"rank {rank} ({self.terms.seats[rank].host})" for rank in absent[:8])
            return text + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        waiting = self.processes.among(Stage.WAITING)
        here = ", ".join(f"{item.host} (process {item.message['pid']})" for item in waiting)
        return f"{self.terms.size - len(waiting)} more; these have joined: {here}"

    def _with_those_ready(
        self, limits: Limits, waiting: int, last: View, refused_connections: str, waited_s: float
    ) -> Decision:
        """Decide whether enough processes of an elastic job are ready."""
        size, start_s = min(waiting, limits.most), self.terms.start_timeout_s
        # Once a member has finished, the others need not wait for new processes.
        enough = size >= limits.min_np or self._finished(last)
        in_time = not is_due(start_s, waited_s) and (enough or not is_due(limits.timeout_s, waited_s))
        if last is NO_VIEW and in_time and self._expects_more(size, limits):
            return Decision(Step.WAIT, actions=(Timer(start_s), Timer(limits.timeout_s)))
        if not enough:
            missing = ", ".join(place.host for _, place in self.processes.missing())
            text = (
                f"{size} of at least {limits.min_np} ranks are ready"
                + (f"; missing: {missing}" if missing else "")
                + (f". The rendezvous turned away {refused_connections}" if refused_connections else "")
            )
            if is_due(limits.timeout_s, waited_s):
                within = f"within {limits.timeout_s:g} s"
                return Decision(Step.FAIL, kind="timeout", text=f"Not enough ranks {within}: {text}.")
            detail = {"size": size, "min_size": limits.min_np, "timeout_s": limits.timeout_s}
            text += f"; waiting for up to {limits.timeout_s:g} s"
            notice = () if last is NO_VIEW else (Notice("waiting", text, detail=detail),)
            return Decision(Step.WAIT, actions=(Timer(start_s), Timer(limits.timeout_s), *notice))
        candidates = [item.candidate() for item in self.processes.among(Stage.WAITING)]
        newest = max(item.position for item in candidates)
        if self._newest and not newest:
            text = f"No process that has a state is left after epoch {last.epoch}, only new ones are."
            return Decision(Step.FAIL, kind="lost", text=text)
        self._newest = newest
        return Decision(Step.PUBLISH, rank_order(candidates, limits.most))

    def _expects_more(self, size: int, limits: Limits) -> bool:
        """Return whether more processes will join before the first view; later ones wait for none."""
        if size >= limits.most:
            return False
        return bool(self.processes.missing()) if self.terms.launched else size < limits.start_np

    def _no_survivor(self, last: View) -> Decision:
        """End the job, or fail: all members of the last view have finished or are lost."""
        if self._finished(last):
            return Decision(Step.END)
        lost = [item for item in self.processes.among(Stage.LOST) if item.number in last.numbers]
        why = "; ".join(f"{names([item])}: {item.why_lost}" for item in lost)
        text = f"No rank of epoch {last.epoch} is left, and its state is lost with them. {why}"
        return Decision(Step.FAIL, kind="lost", text=text)

    def _finished(self, last: View) -> bool:
        return any(item.number in last.numbers for item in self.processes.among(Stage.LEFT))


def _check_same(process: Process, message: Message) -> None:
    """Raise Refusal if a process may not continue as this member."""
    if (process.message["pid"], process.message["hostname"]) != (message["pid"], message["hostname"]):
        raise Refusal(
            f"member {process.number} is process {process.message['pid']} on {process.host}, and not "
            f"process {message['pid']} on {message['hostname']}"
        )
    if not process.is_here:
        raise Refusal(f"the job has gone on without this process: {process.why_lost or 'it has left'}")


def _join_order(process: Process) -> Tuple[str, Slot, int]:
    slot = Slot(0, 0) if process.place is None else process.place.slot
    return process.message["hostname"], slot, process.message["pid"]
