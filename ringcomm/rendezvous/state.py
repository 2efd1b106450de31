"""The rendezvous as a state machine without I/O: which ranks have joined, and what happens next.

Events go in (a rank joined, left, disconnected, reported a failure), actions come out (send a message,
close a connection, notify the launcher). There is no socket, thread or clock in here; :mod:`.server` is
the I/O shell around it. A generation goes through these phases::

    JOINING  ->  PROBING  ->  LINKING  ->  RUNNING  ->  (all left) JOINING of the next generation
        \\____________\\____________\\____________\\______  ABORTED
"""

from __future__ import annotations

from enum import Enum
from typing import Dict, List, Optional, Sequence, Set, Tuple

from ..config import Slot
from ..errors import ProtocolError
from ..wire.messages import Message
from .actions import Action, Drop, Notice, Seat, Send, Timer, refuse
from .link_table import link_table
from .linking import Linking
from .listening import census, listen
from .membership import Member, RankAssignment, Refusal
from .pending_members import PendingMembers
from .remarks import Remarks
from .root_cause import EVIDENCE_S, SETTLE_S, VANISHED, RootCause, RootCauseAnalysis
from .routing import Known, NoRoute


class Phase(Enum):
    """How far a generation has come."""

    JOINING = "joining"
    PROBING = "probing"
    LINKING = "linking"
    RUNNING = "running"
    ABORTED = "aborted"


class Rendezvous:
    """The state of one job: its members, their generation and phase, and the failures reported.

    Args:
        size: number of ranks.
        seats: in rank order, if a launcher planned the job.
        version: ringcomm's version; members must have the same.
        start_timeout_s: how long the first rank that joined waits for the last, in seconds.

    Attributes:
        members: by the number of their control connection.
        abort_message: what was sent to every rank when the job failed; None as long as it has not.
        refused_connections: the connections that failed to authenticate, as text; empty if none did.
        unreachable: two ranks between which there is no route, or no link could be built; empty if there are
            none.
        known: what has been measured between hosts.
    """

    def __init__(self, size: int, seats: Sequence[Seat], version: str, start_timeout_s: float) -> None:
        self.size = size
        self.start_timeout_s = start_timeout_s
        self.generation = 0
        self.phase = Phase.JOINING
        self.members: Dict[int, Member] = {}
        self.abort_message: Optional[Message] = None
        self.refused_connections = ""
        self.unreachable: Tuple[int, ...] = ()
        self._had_started = False
        self._ranks = RankAssignment(size, seats, version)
        self._analysis = RootCauseAnalysis()
        self._waiting = PendingMembers(self._ranks, start_timeout_s)
        self._by_rank: Dict[int, Member] = {}
        self._by_slot: Dict[Slot, List[Member]] = {}
        self._staying: Set[int] = set()
        self.known: Known = {}
        self._linking = Linking((), 0)
        self._remarks = Remarks()

    # ---- joining -----------------------------------------------------------------------------

    def joined(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """An authenticated process asks to join.

        Raises:
            ProtocolError: it has asked before on this connection.
        """
        if connection in self._waiting or connection in self.members:
            raise ProtocolError("a rank may join only once on one connection")
        try:
            slot, host = self._ranks.place(message)
            if self.abort_message is not None and self._had_started:
                return self._refuse_after_failure(connection, str(self.abort_message["text"]))
            if self.abort_message is not None:
                # It is too late for this job, but reports the same error as all other ranks.
                return [Send(connection, self.abort_message), Drop(connection)]
            # Only ranks that have left may join again, for the next generation.
            left = len(self.members) - len(self._staying)
            room = self.size if self.phase is Phase.JOINING else left
            self._waiting.admit(slot, host, self._at(slot), room)
        except Refusal as refusal:
            return refuse(connection, str(refusal))
        is_first = self._waiting.enter(connection, message, slot, host, now_s)
        actions: List[Action] = [
            Notice("joined", f"{len(self._waiting)} of {self.size} ranks have joined (newest: {host})")
        ]
        if is_first:
            actions.append(Timer(self.start_timeout_s))
        if self.phase is Phase.JOINING:
            actions += self._abort_for_early_exits() or self._start_if_complete(now_s)
        return actions

    def _refuse_after_failure(self, connection: int, failure: str) -> List[Action]:
        """Answer a rank that joins again after the job has failed."""
        if not self._ranks.seats:
            # The next job of these ranks is served by another rendezvous, which it finds if it tries again.
            return [Drop(connection)]
        return refuse(
            connection,
            "this job has failed, and init() cannot start it again: ringrun starts new processes if it is "
            f"called with --restarts N. The failure was: {failure}",
        )

    def is_waiting(self, connection: int) -> bool:
        """Whether the process on this connection has joined, but has no rank yet."""
        return connection in self._waiting

    def _start_if_complete(self, now_s: float) -> List[Action]:
        if len(self._waiting) < self.size:
            return []
        try:
            ordered = self._waiting.assign_ranks()
        except Refusal as refusal:
            return self._abort("startup", f"The job cannot start: {refusal}.", None)
        return self.begin(ordered, now_s)

    def begin(self, ordered: Sequence[Member], now_s: float) -> List[Action]:
        """Start a generation with these members.

        Args:
            ordered: in rank order; their ranks, hosts and local ranks are assigned.
            now_s: the time on the rendezvous' monotonic clock.
        """
        self.members = {member.connection: member for member in ordered}
        self._by_rank = {member.rank: member for member in ordered}
        self._by_slot = {}
        self._staying = set(self.members)
        self._linking = Linking(ordered, self.generation, self.known)
        self._remarks = Remarks()
        self.phase = Phase.PROBING
        for member in ordered:
            member.heard_s = now_s
            if member.slot is not None:
                self._by_slot.setdefault(member.slot, []).append(member)
        return self._linking.begin() + self._listen(now_s) + self._link_if_probed()

    def _listen(self, now_s: float) -> List[Action]:
        """Ping the members, and abort if one has not answered for too long."""
        pings, silent = listen(self._by_rank.values(), self.phase is Phase.RUNNING, now_s)
        return self._abort_for(silent[0]) if silent else pings

    def answered(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """A member answers a ping: from which peers it has received heartbeats, and from which not."""
        member = self.members.get(connection)
        if member is not None:
            member.heard_s, member.asked = now_s, False
            self._analysis.answered(member.rank, message["heard"], message["silent"])
        return []

    # ---- probing and linking -----------------------------------------------------------------

    def probed(self, connection: int, message: Message) -> List[Action]:
        """The first rank of a host reports what it could reach."""
        member = self.members.get(connection)
        if member is None or self.phase is not Phase.PROBING:
            return []
        return self._linking.probed(member, message) + self._link_if_probed()

    def fetched(self, connection: int, message: Message) -> List[Action]:
        """A rank cannot get the list of ranks from another rank: it gets it from here."""
        member = self.members.get(connection)
        if member is None or self.phase not in (Phase.PROBING, Phase.LINKING):
            return []
        return [Notice("note", f"{member.name()}: {message['reason']}"), *self._linking.fetch(member)]

    def measured(self, connection: int, message: Message) -> List[Action]:
        """The first rank of a host has measured what it was asked to."""
        member = self.members.get(connection)
        if member is None or self.phase is not Phase.PROBING:
            return []
        return self._linking.measured(member, message) + self._link_if_probed()

    def _link_if_probed(self) -> List[Action]:
        if not self._linking.probed_all:
            return []
        try:
            actions = self._linking.link()
        except NoRoute as problem:
            self.unreachable = problem.ranks
            return self._abort("no_route", str(problem), None)
        self.known = self._linking.known()
        self.phase = Phase.LINKING
        return actions

    def linked(self, connection: int, message: Message) -> List[Action]:
        """A rank has an authenticated link to every other."""
        member = self.members.get(connection)
        if member is None or self.phase is not Phase.LINKING:
            return []
        if not self._linking.linked(member, message["links"]):
            return []
        self.phase = Phase.RUNNING
        rows = self._linking.rows()
        table = link_table(rows, len(self.members))  # Only rank 0 logs it.
        told = ((item.connection, "" if item.rank else table) for item in self.members.values())
        actions: List[Action] = [Send(to, {"type": "go", "table": text}) for to, text in told]
        actions.append(Notice("started", table, detail={"links": rows, "generation": self.generation}))
        return actions

    def unlinked(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """A rank could not build a link. If the other rank has ended, that will be reported soon."""
        report = {**message, "doing": "", "why": message["reason"], "kind": "unlinked"}
        member = self.members.get(connection)
        if member is not None:
            self.unreachable = member.rank, int(message["peer"])
        return self.lost(connection, report, now_s)

    # ---- failures ----------------------------------------------------------------------------

    def lost(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """A rank reports that it lost another."""
        member = self.members.get(connection)
        peer = self._by_rank.get(int(message["peer"]))
        if member is None or peer is None or self.phase is Phase.ABORTED:
            return []
        wait_s = self._analysis.lost(member.rank, peer, message, now_s)
        return [*census(self.members.values()), Timer(wait_s)]

    def closed(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """The link between two ranks ended without a goodbye, while neither needed it."""
        return self.lost(connection, {**message, "doing": "", "kind": "closed"}, now_s)

    def interrupted(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """A rank has left a collective half-way. Its program may go on, or end in a moment and say more."""
        member = self.members.get(connection)
        if member is None or self.phase is Phase.ABORTED:
            return []
        self._analysis.interrupted(member.rank, message, now_s)
        return [Timer(SETTLE_S)]

    def mismatched(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """A rank reports that another one is in a different call."""
        member = self.members.get(connection)
        if member is None or self.phase is Phase.ABORTED:
            return []
        self._analysis.mismatch(member.rank, str(message["text"]), now_s)
        return [Timer(SETTLE_S)]

    def told(self, connection: int, message: Message) -> List[Action]:
        """A rank has something to say to the user; see :class:`.Remarks`."""
        member = self.members.get(connection)
        return [] if member is None else self._remarks.told(member.rank, message)

    def leaving(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """A rank leaves: it shut down, or its program ended."""
        self._waiting.leave(connection)
        member = self.members.get(connection)
        if member is None:
            return []
        self._mark_left(member, str(message["reason"]))
        if self.phase is Phase.ABORTED:
            return []
        if not message["ok"]:
            member.gone = member.left
            return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        if self.phase in (Phase.PROBING, Phase.LINKING):
            return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        return self._next_generation(now_s)

    def left_for_next_view(self, connection: int, now_s: float) -> List[Action]:
        """A rank has ended its part in this generation, to take part in the next one.

        The ranks that have not are pinged from now on: the last of them has no peer that would notice if it
        was stopped.
        """
        member = self.members.get(connection)
        if member is None or member.left is not None or self.phase is not Phase.RUNNING:
            return []
        first = not self._some_have_left()
        self._mark_left(member, "it has asked for the next view")
        if not first:
            return []
        for other in self.members.values():
            other.heard_s = now_s
        return self._listen(now_s)

    def _mark_left(self, member: Member, why: str) -> None:
        member.left = why
        self._staying.discard(member.connection)

    def _some_have_left(self) -> bool:
        return self.phase is Phase.RUNNING and len(self._staying) < len(self.members)

    def _at(self, slot: Optional[Slot]) -> List[Member]:
        """The members in a place."""
        return self._by_slot.get(slot, []) if slot is not None else []

    def disconnected(self, connection: int, now_s: float) -> List[Action]:
        """A control connection ended."""
        self._waiting.leave(connection)
        member = self.members.get(connection)
        if member is None or not member.is_here:
            return []
        member.gone = self._analysis.exit_of(member.slot) or VANISHED
        if self.phase is Phase.ABORTED:
            return []
        if member.gone != VANISHED:
            return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        # The launcher usually reports within moments how the process ended, which is more informative.
        wait_s = EVIDENCE_S if self._ranks.seats else SETTLE_S
        self._analysis.vanished(member.rank, wait_s, now_s)
        return [Timer(wait_s)]

    def process_exited(self, slot: Slot, how: str, ok: bool, now_s: float) -> List[Action]:
        """The launcher reports that a process has ended."""
        self._analysis.exited(slot, how, ok)
        if self.phase is Phase.ABORTED:
            return []
        for member in self._at(slot):
            if ok and member.left is None and self.phase is Phase.RUNNING:
                # Its goodbye may still be on its way, over a slower wire than the launcher's report.
                self._mark_left(member, how)
                return self._next_generation(now_s)
            if member.left is None or not ok:
                # A rank that has left may still have failed after that; the error of waiting ranks says how.
                member.gone = how
                if member.left is None:
                    return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        return self._abort_for_early_exits()

    def _abort_for_early_exits(self) -> List[Action]:
        """Abort if ranks wait for a process to join that has ended already."""
        found = self._waiting.ended_early(self._analysis) if self.phase is Phase.JOINING else None
        return [] if found is None else self._abort("startup", *found)

    def tick(self, now_s: float) -> List[Action]:
        """Time has passed: act on what is due."""
        if self.phase is Phase.ABORTED:
            return []
        root_cause = self._analysis.due(self._by_rank, now_s)
        if root_cause is not None:
            return self._abort_for(root_cause)
        if self.phase in (Phase.PROBING, Phase.LINKING) or self._some_have_left():
            return self._listen(now_s)
        if self._waiting.is_over(now_s):
            again = self.generation > 0 or self.phase is not Phase.JOINING
            return self._abort("timeout", *self._waiting.timeout_text(again, self.refused_connections))
        return []

    def _abort_for(self, cause: RootCause) -> List[Action]:
        culprit = cause.culprit
        rank, host = (None, None) if culprit is None else (culprit.rank, culprit.host)
        return self._abort(cause.kind, cause.text, rank, host, cause.separated)

    def _abort(
        self,
        kind: str,
        text: str,
        culprit: Optional[int],
        host: Optional[str] = None,
        separated: Sequence[Member] = (),
    ) -> List[Action]:
        self._had_started = self.phase is Phase.RUNNING
        self.phase = Phase.ABORTED
        self.abort_message = {"type": "abort", "kind": kind, "text": text, "rank": culprit, "host": host}
        if separated:
            self.abort_message["ranks"] = [member.rank for member in separated]
            self.abort_message["hosts"] = [member.host for member in separated]
        connections = list(self.members) + self._waiting.connections
        actions: List[Action] = [Send(connection, self.abort_message) for connection in connections]
        member = self._by_rank.get(-1 if culprit is None else culprit)
        leaving = member is not None and member.left is not None
        actions.append(Notice("failed", text, culprit=culprit, detail={"kind": kind, "leaving": leaving}))
        return actions

    def _next_generation(self, now_s: float) -> List[Action]:
        """Once every rank has left without an error: end the job, or start it again with waiting ranks."""
        if self._staying:
            if len(self._staying) + 1 < len(self.members):
                return []
            for connection in self._staying:
                self.members[connection].heard_s = now_s
            return self._listen(now_s)
        self.members = {}
        self._by_rank, self._by_slot = {}, {}
        self._analysis.forget_reports()
        self.generation += 1
        self.phase = Phase.JOINING
        actions: List[Action] = [Notice("ended", "every rank has left")]
        if self._waiting.restart_clock(now_s):
            actions.append(Timer(self.start_timeout_s))
        return actions + (self._abort_for_early_exits() or self._start_if_complete(now_s))
