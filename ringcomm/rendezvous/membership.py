"""The processes of a job: which may join, their views, and when the next view has all that it needs. Pure.

A :class:`Process` has a number for the whole job, which is never given to another one. A :class:`View` is the
membership of one epoch, and a rank a position in it. In a job of fixed size all ranks are in every view. In
an elastic one a view has the processes that are ready when every member of the last one has asked or has
ended. :class:`Assembly` decides by the job's :class:`Terms`. The module begins with the actions that the
rendezvous' state machine returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..clock import is_due
from ..config import Slot
from ..configuration.membership import Limits
from ..wire.messages import Message

EVIDENCE_S = 1.0
"""How long to wait for other reports of a failure if the only evidence is a broken connection."""
SETTLE_S = 0.3
"""How long to wait for other reports that may name an earlier cause."""
START_LIMIT = "--start-timeout (RINGCOMM_START_TIMEOUT)"
MAX_FAILED_VIEWS = 10
"""An elastic job fails after this many views in a row that failed before any new commit or step: what ends
them would end the next ones as well, and ringrun starts lost processes again.
"""
RelayHost = Tuple[str, int]
"""The name of the host that relays between hosts without a route, and for how many pairs of ranks at most."""
NO_RELAY: RelayHost = ("", 0)

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
        Send(connection, {"type": "refused", "reason": reason}), Drop(connection),
        Notice("refused", f"refused a process that asked to join: {reason}"),
    ]  # fmt: skip


class Refusal(Exception):
    """The refusal of a process that asks to join; the text is the reason."""


# ---- processes ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Located:
    """A rank and where it can be dialled, as other ranks see it."""

    rank: int
    host: str
    host_index: int
    local_rank: int
    machine: str  # its identifier
    addresses: List[Dict[str, Any]]  # where it listens while the job starts


def as_target(peer: Located) -> Dict[str, Any]:
    """Return what another rank needs to dial this one."""
    return {"rank": peer.rank, "addresses": peer.addresses, "machine": peer.machine}


class Stage(Enum):
    """The state of a process."""

    WAITING = "waits for the next view"
    IN_VIEW = "is a member of the last view"
    LEFT = "has left without an error"
    LOST = "is lost"


class Process(Located):
    """One process of a job, with its rank in its last view; times are of the rendezvous' clock."""

    def __init__(self, number: int, connection: int, place: Optional[Seat], message: Message) -> None:
        host = place.host if place is not None else message.get("host")
        super().__init__(-1, str(host or message["hostname"]), -1, -1, str(message.get("machine", "")), [])
        self.number, self.connection = number, connection
        self.place = place  # where its launcher has started it, if one did
        self.message = message  # its last request to join
        self.hostname, self.pid = str(message["hostname"]), int(message["pid"])
        self.stage = Stage.WAITING  # changed by :meth:`Processes.move`
        self.asked_s = self.heard_s = 0.0  # its first request to join, and its last message
        self.excluded: Optional[str] = None  # why it must leave at the next boundary
        self.why_lost = ""
        # in its view
        self.left: Optional[str] = None  # the reason in its goodbye message
        self.gone: Optional[str] = None  # how it ended, if it failed
        self.asked = False  # for the peers it receives heartbeats from, without an answer so far

    def take_rank(self, rank: int) -> None:
        """Become a member of the next view."""
        self.rank, self.addresses = rank, self.message["addresses"]
        self.left = self.gone = None
        self.asked = False

    @property
    def is_present(self) -> bool:
        """Return whether it has neither left its view nor ended."""
        return self.left is None and self.gone is None

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
        limit_s = self.message.get("dead_after", 0.0)
        return float(limit_s) if isinstance(limit_s, (int, float)) else 0.0

    @property
    def position(self) -> int:
        """Return the commits or steps that its state contains."""
        position = self.message.get("position", 0)
        return position if type(position) is int else 0

    def name(self) -> str:
        """Return the process as text: its rank in the last view, and its host."""
        return f"a new process on {self.host}" if self.is_new else f"rank {self.rank} ({self.host})"

    def describe(self) -> Dict[str, Any]:
        """Return the description of this rank that is sent to every other."""
        names = ("rank", "host", "host_index", "local_rank", "pid")
        return {**{name: getattr(self, name) for name in names}, "member": self.number}


def number_hosts(ordered: Sequence[Process], planned: bool) -> None:
    """Set every member's host index and local rank. ``planned``: their places say which share a host."""
    hosts: Dict[Any, int] = {}
    counts: Dict[int, int] = {}
    for member in ordered:
        identity: Any = member.hostname, member.machine
        if planned and member.place is not None:
            identity = member.place.slot.host_index
        member.host_index = hosts.setdefault(identity, len(hosts))
        member.local_rank = counts.get(member.host_index, 0)
        counts[member.host_index] = member.local_rank + 1


def named_twice(members: Sequence[Process]) -> str:
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


# ---- views -------------------------------------------------------------------------------------


class View(NamedTuple):
    """The members of one epoch."""

    epoch: int  # grows from view to view
    numbers: Tuple[int, ...]  # of the members, in rank order

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.numbers)


NO_VIEW = View(-1, ())
"""Before the first view is published."""


def rank_order(candidates: Sequence[Process], most: int) -> Tuple[int, ...]:
    """Return the member numbers of the next view, in rank order, at most ``most``. Survivors come before new
    processes and keep their order, except that rank 0 is a survivor with the newest state: state is broadcast
    from rank 0. New processes beyond ``most`` are left out, the last to be started first.
    """
    survivors = sorted((item for item in candidates if item.rank >= 0), key=lambda item: item.rank)
    room = max(0, most - len(survivors))
    new = sorted((item for item in candidates if item.rank < 0), key=lambda item: item.number)[:room]
    new.sort(key=lambda item: (item.place.slot if item.place else Slot(0, 0), item.number))
    if survivors:
        newest = max(survivors, key=lambda item: (item.position, -item.rank))
        survivors.remove(newest)
        survivors.insert(0, newest)
    return tuple(item.number for item in [*survivors, *new])


# ---- terms -------------------------------------------------------------------------------------


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


class Decision(NamedTuple):
    """A decision, when no member of the last view is in it any more: to wait, unless a field says more."""

    order: Tuple[int, ...] = ()  # publish the next view: member numbers in rank order
    kind: str = ""  # fail: the kind of failure, a text, and the rank at fault
    text: str = ""
    culprit: Optional[int] = None
    ends: bool = False  # end the job: all have finished
    actions: Tuple[Action, ...] = ()


class Assembly:
    """Admits processes, and decides about the next view; in a fixed size job a given rank is the number."""

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
        """Return number and place that a process of a job of fixed size names; raises Refusal."""
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
        """Answer a process that asks to join after the job has failed with this ``abort``."""
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
            return Decision()
        is_new = self._since_s is None
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        if limits is None:
            decision = self._with_all(waiting, last, now_s - since_s)
        else:
            decision = self._with_those_ready(limits, waiting, last, now_s - since_s)
        if decision.order:
            self._since_s = None
        return decision if is_new or decision.order or decision.kind else Decision()

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
            return Decision(kind="startup", text=text, culprit=ended)
        if waiting == size:
            try:
                return Decision(self._assign(self.processes.among(Stage.WAITING)))
            except Refusal as refusal:
                return Decision(kind="startup", text=f"The job cannot start: {refusal}.")
        if not is_due(start_s, waited_s):
            return Decision(actions=(Timer(start_s),))
        absent = [rank for rank in range(len(seats)) if not is_waiting(rank)]
        again = "" if last is NO_VIEW else " again"
        text = (
            f"Only {waiting} of {size} ranks have joined{again} within {start_s:g} s. "
            f"Missing: {self._missing(absent)}. "
            f"If they only need longer, raise {self.terms.limit}."
        )
        if self.refused_connections:
            text += f" The rendezvous turned away {self.refused_connections}."
        return Decision(kind="timeout", text=text, culprit=absent[0] if absent else None)

    def _assign(self, processes: Sequence[Process]) -> Tuple[int, ...]:
        """Return the numbers in rank order: by seat, or rank asked for, hostname and process id."""
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
            return Decision(actions=timers)
        if not enough:
            missing = ", ".join(place.host for place in self.processes.missing())
            text = f"{size} of at least {limits.min_np} ranks are ready"
            text += f"; missing: {missing}" if missing else ""
            if self.refused_connections:
                text += f". The rendezvous turned away {self.refused_connections}"
            if timed_out:
                text = f"Not enough ranks within {limits.timeout_s:g} s: {text}."
                return Decision(kind="timeout", text=text)
            detail = {"size": size, "min_size": limits.min_np, "timeout_s": limits.timeout_s}
            text += f"; waiting for up to {limits.timeout_s:g} s"
            notice = () if last is NO_VIEW else (Notice("waiting", text, detail=detail),)
            return Decision(actions=(*timers, *notice))
        candidates = self.processes.among(Stage.WAITING)
        newest = max(item.position for item in candidates)
        if self._newest and not newest:
            text = f"No process that has a state is left after epoch {last.epoch}, only new ones are."
            return Decision(kind="lost", text=text)
        if newest > self._newest or not newest:
            self._newest, self._failed_views = newest, 0
        if self._failed_views >= MAX_FAILED_VIEWS:
            text = f"{self._failed_views} views have failed, one after the other, before any commit or step. "
            return Decision(kind="lost", text=f"{text}The last failure: {self._last_failure}")
        return Decision(rank_order(candidates, limits.most))

    def _expects_more(self, size: int, limits: Limits) -> bool:
        """Return whether more processes will join before the first view; later ones wait for none."""
        if size >= limits.most:
            return False
        return bool(self.processes.missing()) if self.terms.launched else size < limits.start_np

    def _no_survivor(self, last: View) -> Decision:
        """End the job, or fail: all members of the last view have finished or are lost."""
        if self._finished(last):
            return Decision(ends=True)
        lost = [item for item in self.processes.among(Stage.LOST) if item.number in last.numbers]
        why = "; ".join(f"{item.name()}: {item.why_lost}" for item in lost)
        text = f"No rank of epoch {last.epoch} is left, and its state is lost with them. {why}"
        return Decision(kind="lost", text=text)

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
