"""The rendezvous of a job, without I/O: publishes views, one after another.

Events go in (a process joined, left, disconnected, reported a failure), actions come out (send a message,
close a connection, notify the launcher); :mod:`.server` is the I/O shell around it.

Each view is one :class:`~.epoch.Epoch`: it connects the members, collects their failure reports and finds the
root cause. This module publishes the views, on which the job's :class:`~.membership.Assembly` decides. In a
job of fixed size a view has all ranks, and the next one begins when all of them have left and joined again;
the failure of an epoch is that of the job.

When an epoch of an elastic job fails, or when processes are to join or to leave, its members ask for the next
view on the connections that they have. Once every member has asked or is lost, the next view is published,
with the new processes that are ready by then. A root cause ends the job only if it cannot continue.
"""

from __future__ import annotations

import math
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

from ..clock import is_due
from ..config import Slot
from ..errors import ProtocolError
from ..wire.messages import Message
from .epoch import VANISHED, Epoch, Phase
from .membership import (
    ADDED,
    NO_VIEW,
    REMOVED,
    Action,
    Assembly,
    Drop,
    Notice,
    Process,
    Refusal,
    Seat,
    Send,
    Stage,
    Terms,
    Timer,
    View,
    exclude,
    named_twice,
    number_hosts,
    refuse,
)

_NO_MEMBER = -1
"""In place of the connection of a process outside the view: its reports have no effect."""
TOGETHER_S = 30.0
"""How long a process waits at most for those that were started with it on its host. The members continue."""
_MAX_PING_INTERVAL_S = 5.0
_PINGS_PER_LIMIT = 6
"""Number of pings within the time after which a silent process counts as failed."""


class Rendezvous:
    """The state of one job."""

    def __init__(self, terms: Terms) -> None:
        self.view: View = NO_VIEW  # the last one that was published
        self.epoch = Epoch()  # of the last view; before the first one it has no members
        self.abort_message: Optional[Message] = None  # sent to every process once the job has failed
        self._terms = terms
        self._assembly = Assembly(terms)
        self._processes = self._assembly.processes
        self._before: View = NO_VIEW
        self._over = self._excludes = False
        self._paused_since_s: Optional[float] = None
        self._holds = False  # processes wait for others of their host, before the members are asked
        self._ping_at_s: Optional[float] = None  # None: no process is pinged at present
        self._cut_off: FrozenSet[int] = frozenset()  # members that did not reach each other in the last epoch

    @property
    def phase(self) -> Phase:
        """Return the progress of the last view."""
        return self.epoch.phase if self.abort_message is None else Phase.ABORTED

    def note_refused(self, text: str) -> None:
        """Set the text about connections that failed to authenticate."""
        self._assembly.refused_connections = text

    # ---- what the launcher reports ------------------------------------------------------------

    def expect(self, number: int, slot: Slot, host: str) -> List[Action]:
        """Expect a process of an elastic job that is about to be started; its members continue."""
        self._processes.expected[number] = Seat(slot, host)
        return self._to_members({"type": "announced"})

    def _to_members(self, message: Message) -> List[Action]:
        return [Send(item.connection, message) for item in self._processes.among(Stage.IN_VIEW)]

    def _ask(self, change: int) -> List[Action]:
        """Ask the members to come to the next view at the next boundary between steps."""
        return self._to_members({"type": "updated", "change": change})

    def process_exited(self, number: int, how: str, ok: bool, now_s: float) -> List[Action]:
        """Note the launcher's report that a process has ended, by member number (its rank)."""
        self._processes.exits[number] = how, ok
        process = self._processes.get(number)
        actions: List[Action] = []
        if process is None:
            actions += self._invite(now_s) if self._holds else []  # perhaps for this one
        elif process.stage is Stage.WAITING and process.is_new:
            if self._terms.is_elastic:
                self._processes.forget(process)
            # Otherwise it waits until its connection ends: it may be alive, on a host that is cut off.
        elif process.is_here:
            self._end(process, how, ok)
        elif process.stage is Stage.LOST and process.why_lost == VANISHED:
            process.why_lost = how
        # Its connection may have ended first; how the process ended is the better root cause.
        actions += self._relay(self.epoch.process_exited(number, how, ok, now_s), now_s)
        return actions + self._advance(now_s)

    def exclude(self, number: int, why: str, now_s: float) -> List[Action]:
        """Make a member of an elastic job leave at the next boundary between steps, without an error."""
        self._processes.expected.pop(number, None)
        process = self._processes.get(number)
        if process is None:
            return []
        process.excluded, self._excludes = why, True
        if process.stage is Stage.WAITING and process.is_new:
            return self._dismiss(process, why)
        return self._ask(REMOVED) if process.stage is Stage.IN_VIEW else self._advance(now_s)

    # ---- what processes send ------------------------------------------------------------------

    def handle(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """Handle a message of a process; raises ProtocolError if it may not send it."""
        kind, process = message["type"], self._processes.at(connection)
        if kind == "join":
            return self._joined(connection, message, now_s)
        if kind == "count":  # before it joins
            return [Send(connection, {"type": "counted", "size": self.view.size})]
        if kind == "leaving":
            return self._leaving(connection, message, now_s)
        if kind == "short":
            return self._short(str(message["text"]), now_s)
        if kind == "pong" and process is not None:
            process.heard_s = now_s
        counts = not self._terms.is_elastic or (process is not None and process.stage is Stage.IN_VIEW)
        return self._relay(self.epoch.handle(connection if counts else _NO_MEMBER, message, now_s), now_s)

    def _joined(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """Take a process's request for a place in the next view; ProtocolError if it is too early."""
        known, elastic = self._processes.at(connection), self._terms.is_elastic
        if known is not None and not elastic:
            raise ProtocolError("a rank may join only once on one connection")
        if self.abort_message is not None:
            return self._assembly.too_late(connection, message, self.abort_message, self.epoch.had_started)
        if self._over:
            return exclude(connection, "the job has ended")
        if known is not None:
            message = {**message, "member": known.number}
        elif elastic and type(message.get("member")) is int:
            known = self._processes.get(message["member"])
        stage, old = (None, -1) if known is None else (known.stage, known.connection)
        too_early = stage is Stage.WAITING or (stage is Stage.IN_VIEW and self.epoch.is_linking)
        if old == connection and too_early:
            raise ProtocolError("a process may ask for the next view only after the last one has ended")
        try:
            admitted = self._assembly.admit(message)
        except Refusal as refusal:
            return refuse(connection, str(refusal))
        process = self._processes.enter(connection, message, *admitted, now_s)
        actions: List[Action] = []
        if stage is Stage.IN_VIEW:
            if self._paused_since_s is None:
                self._paused_since_s = now_s
            self.epoch.left_for_next_view(old)
        if stage is not None and old != connection:
            actions.append(Drop(old))
        if process.is_new:
            actions += self._assembly.welcome(process) + self._invite(now_s)
        return actions + self._advance(now_s)

    def _invite(self, now_s: float) -> List[Action]:
        """Ask the members of a running view to take in the waiting processes, now or later. Processes of one
        host are ready at different moments, and each change of the view costs all members a pause. So the
        first ones wait for the others of their host, unless these have ended.
        """
        if self.epoch.phase is not Phase.RUNNING:
            return []
        self._holds = False
        waiting = self._processes.among(Stage.WAITING) if self.view.size < self._terms.most else []
        if not waiting:
            return []
        missing = {place.host for place in self._processes.missing()}
        rest_s = min(
            item.asked_s + TOGETHER_S - now_s if item.is_new and item.host in missing else 0.0
            for item in waiting
        )
        self._holds = not is_due(rest_s, 0.0)
        return [Timer(rest_s)] if self._holds else self._ask(ADDED)

    def is_waiting(self, connection: int) -> bool:
        """Return whether the process of this connection waits for the next view."""
        process = self._processes.at(connection)
        return process is not None and process.stage is Stage.WAITING

    def _leaving(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """Note that a process leaves: it has finished, or its program has ended."""
        process = self._processes.at(connection)
        if process is None or not process.is_here:
            # In a job of fixed size the launcher's report may come before a rank's goodbye, which says more.
            late = [] if self._terms.is_elastic else self.epoch.handle(connection, message, now_s)
            return self._relay(late, now_s)
        stage = process.stage
        if stage is Stage.WAITING and process.is_new:
            self._processes.forget(process)
            return self._advance(now_s)
        self._end(process, str(message["reason"]), bool(message["ok"]))
        events = self.epoch.handle(connection, message, now_s) if stage is Stage.IN_VIEW else []
        return self._relay(events, now_s) + self._advance(now_s)

    def _short(self, text: str, now_s: float) -> List[Action]:
        """Abort a job of fixed size: a process lacks something for its links, and all get its text."""
        if self.abort_message is not None or self._terms.is_elastic:
            return []
        if self.epoch.phase is Phase.JOINING:
            return self._fail("startup", text)
        return self._relay(self.epoch.abort("startup", text, None), now_s)

    def disconnected(self, connection: int, now_s: float) -> List[Action]:
        """Note that the control connection of a process has ended."""
        process = self._processes.at(connection)
        if process is None:
            return []
        stage = process.stage
        self._processes.disconnect(process)
        if stage is Stage.WAITING and process.is_new:
            self._processes.forget(process)
            return self._advance(now_s)
        actions: List[Action] = []
        if process.is_here:
            how, _ = self._processes.exits.get(process.number, (VANISHED, False))
            self._processes.move(process, Stage.LOST, how)
        if stage is Stage.IN_VIEW:
            actions = self._relay(self.epoch.disconnected(connection, now_s), now_s)
        return actions + self._advance(now_s)

    def _end(self, process: Process, how: str, ok: bool) -> None:
        """End a process that has been in a view; it has finished if nothing was wrong then."""
        running = self.epoch.phase is Phase.RUNNING
        finished = ok and running and process.stage is Stage.IN_VIEW
        self._processes.move(process, Stage.LEFT if finished else Stage.LOST, how)

    # ---- the end of an epoch ------------------------------------------------------------------

    def _relay(self, actions: Sequence[Action], now_s: float) -> List[Action]:
        """Return the actions of an epoch, as actions of the job."""
        result: List[Action] = []
        for action in actions:
            if isinstance(action, Notice) and action.kind == "failed":
                result += self._failed(action, now_s)
            elif isinstance(action, Notice) and action.kind == "ended":
                result += self._ended(action, now_s)
            elif not self._terms.is_elastic:
                result.append(action)
            elif isinstance(action, Send) and action.message["type"] == "abort":
                process = self._processes.at(action.connection)
                if process is not None and process.stage is Stage.IN_VIEW:
                    message = {**action.message, "epoch": self.view.epoch}
                    result.append(Send(action.connection, message))
            elif isinstance(action, Notice) and action.kind == "started":
                result += self._started(action, now_s)
            else:
                result.append(action)
        return result

    def _failed(self, notice: Notice, now_s: float) -> List[Action]:
        """Decide whether the job can continue after an abort of its epoch, which the members know."""
        kind = str(notice.detail["kind"])
        if not self._terms.is_elastic:
            self.abort_message = self.epoch.abort_message
            return [*self._abort_waiting(), notice]
        if kind == "mismatch" or (kind == "no_route" and self._before is NO_VIEW):
            return self._fail(kind, notice.text)
        self._assembly.view_failed(notice.text)
        if self._paused_since_s is None:
            self._paused_since_s = now_s
        culprit = self._with_rank(notice.culprit)
        detail: Dict[str, Any] = {
            "epoch": self.view.epoch, "kind": kind, "rank": notice.culprit,
            "member": None if culprit is None else culprit.number,
            "host": None if culprit is None else culprit.host,
        }  # fmt: skip
        actions: List[Action] = [Notice("lost", notice.text, culprit=notice.culprit, detail=detail)]
        left_out = culprit if kind == "stalled" and culprit is not None else self._left_out(kind)
        if left_out is not None and left_out.stage is Stage.IN_VIEW:
            actions += self._drop(left_out, f"in epoch {self.view.epoch} {notice.text}")
        return actions + self._advance(now_s)

    def _left_out(self, kind: str) -> Optional[Process]:
        """Return the member without which the job continues after a failed epoch, if links were at fault."""
        if kind not in ("cut", "no_route"):
            return None
        apart = [self._with_rank(rank) for rank in self.epoch.apart]
        found = [item for item in apart if item is not None and item.stage is Stage.IN_VIEW]
        # A link that has worked may work again: a member is left out only if it is cut off in two epochs, one
        # after the other.
        numbers = frozenset(item.number for item in found)
        again, self._cut_off = numbers & self._cut_off, numbers
        if len(found) < 2 or (kind == "cut" and not again):
            return None
        # New processes are left out first.
        return max(found, key=lambda item: (item.number not in self._before.numbers, item.rank))

    def _with_rank(self, rank: Optional[int]) -> Optional[Process]:
        if rank is None or not 0 <= rank < self.view.size:
            return None
        return self._processes.get(self.view.numbers[rank])

    def _drop(self, process: Process, why: str) -> List[Action]:
        """Go on without a connected process: it does not run, or cannot reach the others."""
        self._processes.move(process, Stage.LOST, why)
        reason = f"the job has gone on without this process: {why}"
        return [Send(process.connection, {"type": "refused", "reason": reason}), Drop(process.connection)]

    def _fail(self, kind: str, text: str, culprit: Optional[int] = None) -> List[Action]:
        """Fail the job. Members of an aborted epoch have their error already."""
        self.abort_message = {"type": "abort", "kind": kind, "text": text, "rank": culprit, "host": None}
        detail = {"kind": kind, "leaving": False}
        return [*self._abort_waiting(), Notice("failed", text, culprit=culprit, detail=detail)]

    def _abort_waiting(self) -> List[Action]:
        """Send the error to the processes that wait."""
        assert self.abort_message is not None
        return [Send(item.connection, self.abort_message) for item in self._processes.among(Stage.WAITING)]

    def _ended(self, notice: Notice, now_s: float) -> List[Action]:
        """Note that every rank has left without an error. In a job of fixed size they may join again."""
        if self._terms.is_elastic:
            return []  # the members of a view leave it for the next one as well
        for process in self._processes.among(Stage.LEFT, Stage.LOST):
            self._processes.forget(process)
        return [notice, *self._advance(now_s)]

    # ---- the next view ------------------------------------------------------------------------

    def _advance(self, now_s: float) -> List[Action]:
        """Publish the next view, if every member of the last one has asked for it or has ended, and ping."""
        joined = self._terms.is_elastic or self.epoch.phase is Phase.JOINING
        if not joined or self._processes.count(Stage.IN_VIEW) or self.abort_message is not None or self._over:
            return self._ping(now_s)
        actions: List[Action] = []
        for process in self._processes.among(Stage.WAITING) if self._excludes else ():
            if process.excluded is not None:
                actions += self._dismiss(process, process.excluded)
        decision = self._assembly.decide(self.view, now_s)
        if decision.order:
            return actions + self._publish(decision.order, now_s)
        if decision.kind:
            return actions + self._fail(decision.kind, decision.text, decision.culprit)
        if decision.ends:
            return actions + self._end_job()
        return [*actions, *decision.actions, *self._ping(now_s)]

    def _end_job(self) -> List[Action]:
        self._over = True
        actions: List[Action] = []
        for process in self._processes.among(Stage.WAITING):
            actions += self._dismiss(process, "the job has ended")
        return [*actions, Notice("ended", "every rank has left")]

    def _dismiss(self, process: Process, why: str) -> List[Action]:
        self._processes.move(process, Stage.LOST, why)
        self._processes.disconnect(process)
        return exclude(process.connection, why)

    def _publish(self, order: Tuple[int, ...], now_s: float) -> List[Action]:
        members = [item for item in map(self._processes.get, order) if item is not None]
        for rank, process in enumerate(members):
            process.take_rank(rank)
            self._processes.move(process, Stage.IN_VIEW)
            process.heard_s = now_s
        number_hosts(members, bool(self._terms.seats))
        self._before = self.view
        self.view = View(self.view.epoch + 1, order)
        exits, terms = self._processes.exits, self._terms
        self.epoch = Epoch(members, self.view.epoch, exits, terms.evidence_s, terms.relay)
        text = "" if self._before.numbers else named_twice(members)
        notices: List[Action] = [Notice("warning", text, detail={"topic": "one machine"})] if text else []
        return notices + self._relay(self.epoch.begin(), now_s) + self._ping(now_s)

    def _started(self, notice: Notice, now_s: float) -> List[Action]:
        """Report that the members of a view are connected; ask them to the next one if necessary."""
        since_s, self._paused_since_s = self._paused_since_s, None
        view, before = self.view, self._before
        gone = [number for number in before.numbers if number not in view.numbers]
        left = {item.number for item in self._processes.among(Stage.LEFT)}
        detail: Dict[str, Any] = {
            "epoch": view.epoch,
            "members": [
                {**item.describe(), "slot": self._slot_of(item.number)}
                for item in self.epoch.members.values()
            ],
            "joined": [number for number in view.numbers if number not in before.numbers],
            "lost": [number for number in gone if number not in left],
            "left": [number for number in gone if number in left],
            "pause_s": 0.0 if since_s is None else now_s - since_s,
            "table": notice.text, "links": notice.detail["links"],
        }  # fmt: skip
        text = f"{view.size} rank{'' if view.size == 1 else 's'}"
        if since_s is not None:
            text = f"going on with {text} after {now_s - since_s:.1f} s"
        excluded = any(item.excluded for item in self._processes.among(Stage.IN_VIEW))
        change = self._ask(REMOVED) if excluded else []
        return [Notice("view", text, detail=detail), *change, *self._invite(now_s)]

    def _slot_of(self, number: int) -> Optional[List[int]]:
        process = self._processes.get(number)
        return None if process is None or process.place is None else list(process.place.slot)

    # ---- time ---------------------------------------------------------------------------------

    def _pinged(self) -> List[Process]:
        """Return the processes that are pinged now; see :meth:`.Epoch.silent`."""
        if self._terms.is_elastic:
            return self._processes.among(Stage.WAITING, Stage.IN_VIEW)
        wanted = self.epoch.is_linking or self.epoch.some_have_left
        return [item for item in self._processes.among(Stage.IN_VIEW) if wanted and item.dead_after_s]

    def _ping(self, now_s: float) -> List[Action]:
        """Ping the processes, unless the last pings are recent."""
        if self._ping_at_s is not None and not is_due(self._ping_at_s, now_s):
            return []
        over = self.abort_message is not None or self._over
        processes = [] if over else self._pinged()
        for process in processes if self._ping_at_s is None else ():
            process.heard_s = now_s
        self._ping_at_s = None
        if not processes:
            return []
        limits_s = (item.dead_after_s / _PINGS_PER_LIMIT or math.inf for item in processes)
        interval_s = min(_MAX_PING_INTERVAL_S, *limits_s)
        self._ping_at_s = now_s + interval_s
        return [*(Send(item.connection, {"type": "ping"}) for item in processes), Timer(interval_s)]

    def _look_for_silent(self, now_s: float) -> List[Action]:
        """Drop the processes that have not answered pings for too long, when it is time to ping again."""
        if self._ping_at_s is None or not is_due(self._ping_at_s, now_s):
            return []
        limited = [item for item in self._pinged() if item.dead_after_s]
        silent = [item for item in limited if is_due(item.heard_s + item.dead_after_s, now_s)]
        members = self._processes.among(Stage.IN_VIEW)
        lost = [item for item in silent if item in members]
        if lost and (self.epoch.is_linking or self.epoch.some_have_left):
            first = min(lost, key=lambda item: item.heard_s)
            return self._relay(self.epoch.silent(first.rank, now_s - first.heard_s), now_s)
        # While a view runs its members monitor each other; only if none of them answers any more, no member
        # can report that.
        if self.epoch.phase is Phase.RUNNING and len(lost) < len(members):
            silent = [item for item in silent if item not in lost]
        actions: List[Action] = []
        for process in silent:
            actions += self._drop(process, f"it has been silent for {now_s - process.heard_s:.0f} s")
            self._processes.disconnect(process)
            if process.is_new:
                self._processes.forget(process)
        return actions

    def tick(self, now_s: float) -> List[Action]:
        """Act on what is due."""
        if self.abort_message is not None or self._over:
            return []
        actions: List[Action] = []
        if self._processes.count(Stage.IN_VIEW) or not self._terms.is_elastic:
            actions += self._relay(self.epoch.tick(now_s), now_s)
        actions += self._look_for_silent(now_s)
        actions += self._invite(now_s) if self._holds else []
        return actions + self._advance(now_s)
