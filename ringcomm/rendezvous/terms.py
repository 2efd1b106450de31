"""Which processes may join a job, and when its next view has all that it needs. Pure.

In a job of fixed size all ranks are in every view. In an elastic one a view has the processes that are ready
when every member of the last one has asked or has ended.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..clock import is_due
from ..config import Slot
from ..configuration.membership import Limits
from ..group.view import NO_VIEW, View, rank_order
from ..wire.messages import Message
from .membership import Action, Drop, Notice, Process, Processes, Refusal, Seat, Send, Stage, Timer, refuse
from .root_cause import EVIDENCE_S, SETTLE_S
from .routing import NO_RELAY, RelayHost

START_LIMIT = "--start-timeout (RINGCOMM_START_TIMEOUT)"
MAX_FAILED_VIEWS = 10
"""An elastic job fails after this many views in a row that failed before any new commit or step: what ends
them would end the next ones as well, and ringrun starts lost processes again.
"""


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
    """Admits processes, and decides about the next view. In a job of fixed size, a rank that was planned or
    asked for is its process's member number.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.processes = Processes(dict(enumerate(terms.seats)))
        self.refused_connections = ""  # the connections that failed to authenticate, as text
        self._planned: Dict[Slot, int] = {seat.slot: rank for rank, seat in enumerate(terms.seats)}
        self._given = terms.size - 1
        self._since_s: Optional[float] = None  # when the wait for the next view began
        self._newest = 0  # the most commits or steps of a state so far
        self._failed_views = 0  # since then
        self._last_failure = ""

    # ---- joining -----------------------------------------------------------------------------

    def admit(self, message: Message) -> Tuple[int, Optional[Seat]]:
        """Return the member number and the place of a process that asks to join; raises Refusal."""
        host, number = self._checked_host(message), message.get("member")
        if not self.terms.is_elastic:
            return self._admit_rank(message, host)
        known = self.processes.get(number) if type(number) is int else None
        if known is not None:
            _check_same(known, message)
            return known.number, known.place
        if number is None and not self.terms.launched:
            number = self._next_number()
        if type(number) is not int or (self.terms.launched and number not in self.processes.expected):
            raise Refusal(f"{host} (process {message['pid']}) was not started by this job's launcher")
        return number, self.processes.expected.get(number)

    def _checked_host(self, message: Message) -> str:
        host = str(message.get("host") or message["hostname"])
        if message["version"] != self.terms.version:
            raise Refusal(
                f"{host} has ringcomm {message['version']}, but this job runs {self.terms.version}. "
                "Install the same on every host, from the same folder or wheel."
            )
        return host

    def _next_number(self) -> int:
        self._given += 1
        while self.processes.get(self._given) is not None:  # it has asked for this number
            self._given += 1
        return self._given

    def _admit_rank(self, message: Message, host: str) -> Tuple[int, Optional[Seat]]:
        number, seat = self._place(message, host)
        holder = None if number is None else self.processes.get(number)
        if seat is not None and holder is not None and holder.is_here:
            raise Refusal(
                f"place {seat.slot.local} on {seat.host} is already taken by process "
                f"{holder.message['pid']} on {holder.message['hostname']}"
            )
        # Only ranks that have left may join again, for the next view.
        count, size = self.processes.count, self.terms.size
        if count(Stage.WAITING) >= size - count(Stage.IN_VIEW) - count(Stage.LOST):
            raise Refusal(f"the job's {size} ranks are complete; {host} came too late")
        return self._next_number() if number is None else number, seat

    def _place(self, message: Message, host: str) -> Tuple[Optional[int], Optional[Seat]]:
        """Return the number and the place of a process of a job of fixed size, if it names them: its rank in
        the plan, or the one that it asks for. Raises Refusal for a rank or place that does not exist.
        """
        rank, place, seats = message.get("rank"), message.get("slot"), self.terms.seats
        if rank is not None and (type(rank) is not int or not 0 <= rank < self.terms.size):
            raise Refusal(f"{host} asks for rank {rank!r}; this job has ranks 0 to {self.terms.size - 1}")
        if not seats:
            holder = None if rank is None else self.processes.get(rank)
            return rank if holder is None or not holder.is_here else None, None
        if place is None:
            raise Refusal(
                f"{host} (process {message['pid']}) was not started by this job's launcher, which "
                "planned a place for every rank"
            )
        number = self._planned.get(_slot(place))
        if number is None:
            raise Refusal(f"{host} asks for the place {place!r}, which was not planned")
        return number, seats[number]

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
                self._place(message, self._checked_host(message))
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

    # ---- the next view -----------------------------------------------------------------------

    def view_failed(self, text: str) -> None:
        """Count a view of an elastic job that has failed."""
        self._failed_views += 1
        self._last_failure = text

    def decide(self, last: View, now_s: float) -> Decision:
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
            decision = self._with_all(waiting, last, now_s - since_s)
        else:
            decision = self._with_those_ready(limits, waiting, last, now_s - since_s)
        if decision.step is Step.PUBLISH:
            self._since_s = None
        return decision if is_new or decision.step is not Step.WAIT else Decision(Step.WAIT)

    def _with_all(self, waiting: int, last: View, waited_s: float) -> Decision:
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
                return Decision(Step.PUBLISH, self._assign(self.processes.among(Stage.WAITING)))
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
        if self.refused_connections:
            text += f" The rendezvous turned away {self.refused_connections}."
        return Decision(Step.FAIL, kind="timeout", text=text, culprit=absent[0] if absent else None)

    def _assign(self, processes: Sequence[Process]) -> Tuple[int, ...]:
        """Return the member numbers of all processes in rank order: by seat, or else by requested rank, the
        others by hostname and process id. Raises Refusal if two ask for the same rank.
        """
        if self.terms.seats:
            return tuple(process.number for process in processes)
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
        rest = iter(sorted(others, key=lambda item: (item.message["hostname"], item.message["pid"])))
        return tuple((wanted.get(rank) or next(rest)).number for rank in range(len(processes)))

    def _missing(self, absent: Sequence[int]) -> str:
        """Return the missing ranks as text; without a plan, their number and the ranks that have joined."""
        if self.terms.seats:
            text = ", ".join(f"rank {rank} ({self.terms.seats[rank].host})" for rank in absent[:8])
            return text + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        waiting = self.processes.among(Stage.WAITING)
        here = ", ".join(f"{item.host} (process {item.message['pid']})" for item in waiting)
        return f"{self.terms.size - len(waiting)} more; these have joined: {here}"

    def _with_those_ready(self, limits: Limits, waiting: int, last: View, waited_s: float) -> Decision:
        """Decide whether enough processes of an elastic job are ready."""
        size, start_s = min(waiting, limits.most), self.terms.start_timeout_s
        timers = Timer(start_s), Timer(limits.timeout_s)
        # Once a member has finished, the others need not wait for new processes.
        enough = size >= limits.min_np or self._finished(last)
        timed_out = is_due(limits.timeout_s, waited_s)
        in_time = not is_due(start_s, waited_s) and (enough or not timed_out)
        if last is NO_VIEW and in_time and self._expects_more(size, limits):
            return Decision(Step.WAIT, actions=timers)
        if not enough:
            missing = ", ".join(place.host for place in self.processes.missing())
            text = f"{size} of at least {limits.min_np} ranks are ready"
            text += f"; missing: {missing}" if missing else ""
            if self.refused_connections:
                text += f". The rendezvous turned away {self.refused_connections}"
            if timed_out:
                text = f"Not enough ranks within {limits.timeout_s:g} s: {text}."
                return Decision(Step.FAIL, kind="timeout", text=text)
            detail = {"size": size, "min_size": limits.min_np, "timeout_s": limits.timeout_s}
            text += f"; waiting for up to {limits.timeout_s:g} s"
            notice = () if last is NO_VIEW else (Notice("waiting", text, detail=detail),)
            return Decision(Step.WAIT, actions=(*timers, *notice))
        candidates = [item.candidate() for item in self.processes.among(Stage.WAITING)]
        newest = max(item.position for item in candidates)
        if self._newest and not newest:
            text = f"No process that has a state is left after epoch {last.epoch}, only new ones are."
            return Decision(Step.FAIL, kind="lost", text=text)
        if newest > self._newest or not newest:
            self._newest, self._failed_views = newest, 0
        if self._failed_views >= MAX_FAILED_VIEWS:
            text = f"{self._failed_views} views have failed, one after the other, before any commit or step. "
            return Decision(Step.FAIL, kind="lost", text=f"{text}The last failure: {self._last_failure}")
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
        why = "; ".join(f"{item.name()}: {item.why_lost}" for item in lost)
        text = f"No rank of epoch {last.epoch} is left, and its state is lost with them. {why}"
        return Decision(Step.FAIL, kind="lost", text=text)

    def _finished(self, last: View) -> bool:
        return any(item.number in last.numbers for item in self.processes.among(Stage.LEFT))


def _slot(place: Any) -> Slot:
    """Return a place in a message; raises Refusal if it is malformed."""
    try:
        return Slot(int(place[0]), int(place[1]))
    except (TypeError, ValueError, OverflowError, IndexError, KeyError):
        raise Refusal(f"a process names an invalid place: {place!r}") from None


def _check_same(process: Process, message: Message) -> None:
    """Raise Refusal if a process may not continue as this member."""
    if (process.message["pid"], process.message["hostname"]) != (message["pid"], message["hostname"]):
        raise Refusal(
            f"member {process.number} is process {process.message['pid']} on {process.host}, and not "
            f"process {message['pid']} on {message['hostname']}"
        )
    if not process.is_here:
        raise Refusal(f"the job has gone on without this process: {process.why_lost or 'it has left'}")
