"""The rendezvous of an elastic job, without I/O: publishes views, one after another.

Each view is one epoch, and each epoch is one :class:`~ringcomm.rendezvous.epoch.Epoch`: it connects the
members, collects their failure reports and finds the root cause. This module decides which processes are
members. When an epoch fails, or when processes are to join or to leave, its members ask for the next view on
the connections that they have. Once every member has asked or is lost, the next view is published, with the
new processes that are ready by then. New processes never delay a view.

A root cause belongs to the epoch in which it happened: it ends the epoch, and the job only if the job cannot
go on (a defect of the program, too few processes for too long, too many views).
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from ..config import Slot
from ..configuration.limits import Limits
from ..errors import ProtocolError
from ..group.view import NO_VIEW, View
from ..group.view import Member as ViewMember
from ..wire.messages import Message
from .actions import Action, Drop, Notice, Seat, Send, Timer, exclude, refuse
from .elastic_notices import lost_notice, ready_notice, view_notice, waiting_notice
from .epoch import Epoch, Phase
from .joining import REMOVED, Joining
from .membership import Member, Refusal, number_hosts
from .next_view import Cuts, Decision, NextView, Step
from .pings import Pings
from .processes import Process, Processes, Stage
from .root_cause import VANISHED

_NO_MEMBER = -1
"""In place of the connection of a process that is not in the view: what it reports has no effect."""


class ElasticRendezvous:
    """The state of an elastic job.

    Args:
        limits: of the job.
        version: ringcomm's version; processes must have the same.
        launched: whether only processes that a launcher has announced may join.
        start_timeout_s: how long the first view waits for all processes, in seconds.

    Attributes:
        view: the last view that was published.
        abort_message: what every process is sent once the job has failed; None until then.
        refused_connections: the connections that failed to authenticate, as text; empty if none did.
    """

    def __init__(self, limits: Limits, version: str, launched: bool, start_timeout_s: float) -> None:
        self.view: View = NO_VIEW
        self.abort_message: Optional[Message] = None
        self.refused_connections = ""
        self._limits = limits
        self._start_timeout_s = start_timeout_s
        self._processes = Processes(version, launched)
        self._joining = Joining(self._processes, limits.most)
        self._next = NextView(limits, self._processes, launched, start_timeout_s)
        self._epoch = Epoch()
        self._before: View = NO_VIEW
        self._over = self._excludes = self._network_changed = False
        self._paused_since_s: Optional[float] = None
        self._pings = Pings()
        self._cuts = Cuts()

    @property
    def phase(self) -> Phase:
        """How far the last view has come."""
        return self._epoch.phase

    # ---- what the launcher reports ------------------------------------------------------------

    def expect(self, number: int, slot: Slot, host: str) -> List[Action]:
        """A process is about to be started."""
        return self._joining.expect(number, Seat(slot, host))

    def process_exited(self, number: int, how: str, ok: bool, now_s: float) -> List[Action]:
        """The process of a member has ended."""
        self._processes.exits[number] = how, ok
        process = self._processes.get(number)
        if process is None:
            held = self._invite(now_s) if self._joining.held else []  # perhaps for this one
            return held + self._advance(now_s)
        stage = process.stage
        if stage is Stage.WAITING and process.is_new:
            self._processes.forget(process)
        elif stage in (Stage.WAITING, Stage.IN_VIEW):
            self._end(process, how, ok)
        elif stage is Stage.LOST and process.why_lost == VANISHED:
            process.why_lost = how
        actions: List[Action] = []
        # Its connection may have ended first; how the process ended is the better root cause.
        member = number in self.view.numbers and stage is not Stage.WAITING
        if member and process.place is not None:
            slot = process.place.slot
            actions = self._relay(self._epoch.process_exited(slot, how, ok, now_s), now_s)
        return actions + self._advance(now_s)

    def exclude(self, number: int, why: str, now_s: float) -> List[Action]:
        """A member is to leave at the next boundary between steps, without an error."""
        self._processes.expected.pop(number, None)
        process = self._processes.get(number)
        if process is None:
            return []
        process.excluded, self._excludes = why, True
        if process.stage is Stage.WAITING and process.is_new:
            return self._dismiss(process, why)
        return self._joining.ask(REMOVED) if process.stage is Stage.IN_VIEW else self._advance(now_s)

    # ---- what processes send ------------------------------------------------------------------

    def handle(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """A process sends a message.

        Raises:
            ProtocolError: it may not send it.
        """
        kind, process = message["type"], self._processes.at(connection)
        if kind == "join":
            return self._joined(connection, message, now_s)
        if kind == "count":  # before it joins
            return [Send(connection, {"type": "counted", "size": self.view.size})]
        if kind == "leaving":
            return self._leaving(connection, message, now_s)
        if kind == "pong" and process is not None:
            process.heard_s = now_s
        in_view = process is not None and process.stage is Stage.IN_VIEW
        return self._relay(self._epoch.handle(connection if in_view else _NO_MEMBER, message, now_s), now_s)

    def _joined(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """A process asks for a place in the next view.

        Raises:
            ProtocolError: it has done so already, or its epoch has not ended.
        """
        if self.abort_message is not None:
            return [Send(connection, self.abort_message), Drop(connection)]
        if self._over:
            return exclude(connection, "the job has ended")
        number = message.get("member")
        known = self._processes.at(connection)
        if known is None and type(number) is int:
            known = self._processes.get(number)
        elif known is not None:
            message = {**message, "member": known.number}
        stage, old = (None, -1) if known is None else (known.stage, known.connection)
        too_early = stage is Stage.WAITING or (stage is Stage.IN_VIEW and self._epoch.is_linking)
        if old == connection and too_early:
            raise ProtocolError("a process may ask for the next view only after the last one has ended")
        try:
            process = self._processes.enter(connection, message, now_s)
        except Refusal as refusal:
            return refuse(connection, str(refusal))
        actions: List[Action] = []
        if stage is Stage.IN_VIEW:
            if self._paused_since_s is None:
                self._paused_since_s = now_s
            actions += self._relay(self._epoch.left_for_next_view(old, now_s), now_s)
        if stage is not None and old != connection:
            actions.append(Drop(old))
        if process.is_new:
            actions += self._welcome(process, now_s)
        return actions + self._advance(now_s)

    def _welcome(self, process: Process, now_s: float) -> List[Action]:
        actions: List[Action] = [
            Send(process.connection, {"type": "waiting", "member": process.number}),
            ready_notice(process, self._processes.count(Stage.WAITING)),
        ]
        return actions + self._invite(now_s)

    def _invite(self, now_s: float) -> List[Action]:
        """Ask the members of a running view to take in the processes that wait, now or later."""
        return self._joining.invite(self.view.size, now_s) if self._epoch.phase is Phase.RUNNING else []

    def is_waiting(self, connection: int) -> bool:
        """Return whether the process of this connection waits for the next view."""
        process = self._processes.at(connection)
        return process is not None and process.stage is Stage.WAITING

    def _leaving(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """A process leaves: it has finished, or its program has ended."""
        process = self._processes.at(connection)
        if process is None:
            return []
        stage = process.stage
        if stage is Stage.WAITING and process.is_new:
            self._processes.forget(process)
            return []
        if stage not in (Stage.WAITING, Stage.IN_VIEW):
            return []
        self._end(process, str(message["reason"]), bool(message["ok"]))
        actions: List[Action] = []
        if stage is Stage.IN_VIEW:
            actions = self._relay(self._epoch.handle(connection, message, now_s), now_s)
        return actions + self._advance(now_s)

    def disconnected(self, connection: int, now_s: float) -> List[Action]:
        """The control connection of a process has ended."""
        process = self._processes.at(connection)
        if process is None:
            return []
        stage = process.stage
        self._processes.disconnect(process)
        if stage is Stage.WAITING and process.is_new:
            self._processes.forget(process)
            return []
        actions: List[Action] = []
        if stage in (Stage.WAITING, Stage.IN_VIEW):
            how, _ = self._processes.exits.get(process.number, (VANISHED, False))
            process.stage, process.why_lost = Stage.LOST, how
        if stage is Stage.IN_VIEW:
            actions = self._relay(self._epoch.disconnected(connection, now_s), now_s)
        return actions + self._advance(now_s)

    def _end(self, process: Process, how: str, ok: bool) -> None:
        """A process that has been in a view ends; it has finished if nothing was wrong then."""
        running = self._epoch.phase is Phase.RUNNING
        finished = ok and running and process.stage is Stage.IN_VIEW
        process.stage = Stage.LEFT if finished else Stage.LOST
        process.why_lost = how

    # ---- the end of an epoch ------------------------------------------------------------------

    def _relay(self, actions: Sequence[Action], now_s: float) -> List[Action]:
        """The actions of an epoch, as actions of the job."""
        result: List[Action] = []
        for action in actions:
            if isinstance(action, Send) and action.message["type"] == "abort":
                process = self._processes.at(action.connection)
                if process is not None and process.stage is Stage.IN_VIEW:
                    message = {**action.message, "epoch": self.view.epoch}
                    result.append(Send(action.connection, message))
            elif isinstance(action, Notice) and action.kind == "failed":
                result += self._failed(action, now_s)
            elif isinstance(action, Notice) and action.kind == "started":
                result += self._started(action, now_s)
            elif not (isinstance(action, Notice) and action.kind in ("joined", "ended")):
                result.append(action)
        return result

    def _failed(self, notice: Notice, now_s: float) -> List[Action]:
        """The epoch has been aborted, and its members have been told. Can the job go on?"""
        kind = str(notice.detail["kind"])
        first = self._before is NO_VIEW
        if kind == "mismatch" or (kind == "no_route" and first):
            return self._fail(kind, notice.text)
        if self._paused_since_s is None:
            self._paused_since_s = now_s
        self._network_changed = kind != "lost"  # silent hosts and cut links may have another network now
        for process in self._processes.among(Stage.IN_VIEW):
            process.heard_s = now_s
        culprit = self._with_rank(notice.culprit)
        actions: List[Action] = [lost_notice(notice, self.view.epoch, culprit)]
        for process in self._to_drop(kind, culprit):
            actions += self._drop(process, f"in epoch {self.view.epoch} {notice.text}")
        return actions + self._advance(now_s)

    def _with_rank(self, rank: Optional[int]) -> Optional[Process]:
        if rank is None or not 0 <= rank < self.view.size:
            return None
        return self._processes.get(self.view.members[rank].number)

    def _to_drop(self, kind: str, culprit: Optional[Process]) -> List[Process]:
        """The connected processes without which the job goes on after its epoch has failed."""
        assert self._epoch.abort_message is not None
        if kind == "stalled" and culprit is not None:
            return [culprit] if culprit.stage is Stage.IN_VIEW else []
        if kind not in ("cut", "no_route"):
            return []
        ranks = self._epoch.abort_message.get("ranks", ()) or self._epoch.unreachable
        found = [self._with_rank(rank) for rank in ranks]
        apart = [item for item in found if item is not None and item.stage is Stage.IN_VIEW]
        return self._cuts.left_out(apart, kind == "cut", self._before)

    def _drop(self, process: Process, why: str) -> List[Action]:
        """Go on without a process that is connected: it does not run, or cannot reach the others."""
        process.stage, process.why_lost = Stage.LOST, why
        reason = f"the job has gone on without this process: {why}"
        return [Send(process.connection, {"type": "refused", "reason": reason}), Drop(process.connection)]

    def _fail(self, kind: str, text: str) -> List[Action]:
        """The job cannot go on. Members of an epoch that was aborted have been told already."""
        self.abort_message = {"type": "abort", "kind": kind, "text": text, "rank": None, "host": None}
        waiting = self._processes.among(Stage.WAITING)
        actions: List[Action] = [Send(item.connection, self.abort_message) for item in waiting]
        return [*actions, Notice("failed", text, detail={"kind": kind, "leaving": False})]

    # ---- the next view ------------------------------------------------------------------------

    def _advance(self, now_s: float) -> List[Action]:
        """Publish the next view, if every member of the last one has asked for it or has ended."""
        if self.abort_message is not None or self._over or self._processes.count(Stage.IN_VIEW):
            return self._keep_pinging(now_s)
        actions: List[Action] = []
        for process in self._processes.among(Stage.WAITING) if self._excludes else ():
            if process.excluded is not None:
                actions += self._dismiss(process, process.excluded)
        decision = self._next.decide(self.view, self.refused_connections, now_s)
        if decision.step is Step.PUBLISH:
            return actions + self._publish(decision.order, now_s)
        if decision.step is Step.FAIL:
            return actions + self._fail(decision.kind, decision.text)
        if decision.step is Step.END:
            return actions + self._end_job()
        return actions + self._wait(decision) + self._keep_pinging(now_s)

    def _wait(self, decision: Decision) -> List[Action]:
        """Too few processes: wait for more, up to the limit."""
        if not decision.is_new:
            return []
        limits = self._limits
        timers: List[Action] = [Timer(self._start_timeout_s), Timer(limits.timeout_s)]
        return timers if self.view is NO_VIEW else [*timers, waiting_notice(decision, limits)]

    def _end_job(self) -> List[Action]:
        self._over = True
        actions: List[Action] = []
        for process in self._processes.among(Stage.WAITING):
            actions += self._dismiss(process, "the job has ended")
        return [*actions, Notice("ended", "every rank has left")]

    def _dismiss(self, process: Process, why: str) -> List[Action]:
        process.stage, process.why_lost = Stage.LOST, why
        self._processes.disconnect(process)
        return exclude(process.connection, why)

    def _publish(self, order: Tuple[int, ...], now_s: float) -> List[Action]:
        members: List[Member] = []
        for rank, number in enumerate(order):
            process = self._processes.get(number)
            assert process is not None
            slot = None if process.place is None else process.place.slot
            member = Member(process.connection, process.message, slot, process.host)
            member.rank = process.rank = rank
            member.number = number
            process.stage, process.heard_s = Stage.IN_VIEW, now_s
            members.append(member)
        number_hosts(members, planned=False)  # one host may have several names, or a new agent
        self._before = self.view
        self.view = View(
            self.view.epoch + 1, tuple(ViewMember(item.number, item.host, item.pid) for item in members)
        )
        self._epoch = Epoch(members, self.view.epoch, {} if self._network_changed else self._epoch.known)
        self._network_changed = False
        return self._relay(self._epoch.begin(now_s), now_s) + self._keep_pinging(now_s)

    def _started(self, notice: Notice, now_s: float) -> List[Action]:
        """The members of a view are connected."""
        since_s, self._paused_since_s = self._paused_since_s, None
        members = self._processes.among(Stage.IN_VIEW)
        for process in members:
            process.heard_s = now_s
        change = REMOVED if any(item.excluded for item in members) else 0
        left = {item.number for item in self._processes.among(Stage.LEFT)}
        pause_s = None if since_s is None else now_s - since_s
        ordered = self._epoch.members.values()
        report = view_notice(notice, self.view, self._before, ordered, left, pause_s)
        return [report, *(self._joining.ask(change) if change else []), *self._invite(now_s)]

    # ---- time ---------------------------------------------------------------------------------

    def _pinged(self) -> List[Process]:
        """The processes that are pinged: all that wait, and the members of the view unless it is set up."""
        return self._processes.among(Stage.WAITING, *([] if self._epoch.is_linking else [Stage.IN_VIEW]))

    def _keep_pinging(self, now_s: float) -> List[Action]:
        idle = self.abort_message is not None or self._pings.recent
        return [] if idle else self._pings.keep_up(self._pinged(), now_s)

    def _look_for_silent(self, now_s: float) -> List[Action]:
        """Drop the processes that have not answered pings for too long.

        While a view runs its members monitor each other. Only if none of them answers any more, no member
        can report that.
        """
        silent = self._pings.silent(self._pinged(), now_s)
        members = self._processes.among(Stage.IN_VIEW)
        if self._epoch.phase is Phase.RUNNING and not set(members) <= set(silent):
            silent = [item for item in silent if item not in members]
        actions: List[Action] = []
        for process in silent:
            actions += self._drop(process, f"it has been silent for {now_s - process.heard_s:.0f} s")
            self._processes.disconnect(process)
            if process.is_new:
                self._processes.forget(process)
        return actions

    def tick(self, now_s: float) -> List[Action]:
        """Time has passed: act on what is due."""
        if self.abort_message is not None or self._over:
            return []
        actions: List[Action] = []
        if self._processes.count(Stage.IN_VIEW):
            actions += self._relay(self._epoch.tick(now_s), now_s)
        actions += self._look_for_silent(now_s)
        actions += self._invite(now_s) if self._joining.held else []
        return actions + self._advance(now_s)
