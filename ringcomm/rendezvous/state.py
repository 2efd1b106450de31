"""The rendezvous of a job of fixed size, without I/O: which ranks have joined, and what happens next.

Events go in (a rank joined, left, disconnected, reported a failure), actions come out (send a message,
close a connection, notify the launcher). There is no socket, thread or clock in here; :mod:`.server` is
the I/O shell around it. Once all ranks have joined they are one generation, an :class:`~.epoch.Epoch`; when
all of them have left, they may join again for the next one.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

from ..errors import ProtocolError
from ..wire.messages import Message
from .actions import Action, Drop, Notice, Seat, Send, Timer, refuse
from .epoch import Epoch, Phase
from .membership import RankAssignment, Refusal
from .pending_members import PendingMembers
from .root_cause import EVIDENCE_S, SETTLE_S, RootCauseAnalysis


class Rendezvous:
    """The state of one job: the ranks that have joined, their generation, and how processes have ended.

    Args:
        size: number of ranks.
        seats: in rank order, if a launcher planned the job.
        version: ringcomm's version; members must have the same.
        start_timeout_s: how long the first rank that joined waits for the last, in seconds.

    Attributes:
        epoch: the present generation; it has no members until all ranks have joined.
        refused_connections: the connections that failed to authenticate, as text; empty if none did.
    """

    def __init__(self, size: int, seats: Sequence[Seat], version: str, start_timeout_s: float) -> None:
        self.size = size
        self.start_timeout_s = start_timeout_s
        self.refused_connections = ""
        self._ranks = RankAssignment(size, seats, version)
        self._analysis = RootCauseAnalysis()
        self._waiting = PendingMembers(self._ranks, start_timeout_s)
        self.epoch = Epoch(analysis=self._analysis)

    @property
    def phase(self) -> Phase:
        """How far the present generation has come."""
        return self.epoch.phase

    @property
    def abort_message(self) -> Optional[Message]:
        """What was sent to every rank when the job failed; None as long as it has not."""
        return self.epoch.abort_message

    def handle(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """A process sends a message.

        Raises:
            ProtocolError: it may not send it.
        """
        if message["type"] == "join":
            return self._joined(connection, message, now_s)
        if message["type"] == "leaving":
            self._waiting.leave(connection)
        return self._relay(self.epoch.handle(connection, message, now_s), now_s)

    def is_waiting(self, connection: int) -> bool:
        """Return whether the process on this connection has joined, but has no rank yet."""
        return connection in self._waiting

    def disconnected(self, connection: int, now_s: float) -> List[Action]:
        """A control connection ended."""
        self._waiting.leave(connection)
        return self._relay(self.epoch.disconnected(connection, now_s), now_s)

    def process_exited(self, number: int, how: str, ok: bool, now_s: float) -> List[Action]:
        """The launcher reports that the process of a rank has ended.

        Args:
            number: the rank, as planned.
            how: how it ended.
            ok: whether that is a normal end.
            now_s: the time on the rendezvous' monotonic clock.
        """
        slot = self._ranks.slot_of(number)
        actions = self._relay(self.epoch.process_exited(slot, how, ok, now_s), now_s)
        return actions or self._abort_for_early_exits(now_s)

    def tick(self, now_s: float) -> List[Action]:
        """Time has passed: act on what is due."""
        if self.phase is not Phase.JOINING:
            return self._relay(self.epoch.tick(now_s), now_s)
        if self._waiting.is_over(now_s):
            text, missing = self._waiting.timeout_text(self.epoch.generation > 0, self.refused_connections)
            return self._relay(self.epoch.abort("timeout", text, missing), now_s)
        return []

    # ---- joining -----------------------------------------------------------------------------

    def _joined(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """An authenticated process asks to join.

        Raises:
            ProtocolError: it has asked before on this connection.
        """
        if connection in self._waiting or connection in self.epoch.members:
            raise ProtocolError("a rank may join only once on one connection")
        try:
            slot, host = self._ranks.place(message)
            if self.abort_message is not None and self.epoch.had_started:
                return self._refuse_after_failure(connection, str(self.abort_message["text"]))
            if self.abort_message is not None:
                # It is too late for this job, but reports the same error as all other ranks.
                return [Send(connection, self.abort_message), Drop(connection)]
            # Only ranks that have left may join again, for the next generation.
            room = self.size if self.phase is Phase.JOINING else self.epoch.left
            self._waiting.admit(slot, host, self.epoch.at(slot), room)
        except Refusal as refusal:
            return refuse(connection, str(refusal))
        is_first = self._waiting.enter(connection, message, slot, host, now_s)
        actions: List[Action] = [
            Notice("joined", f"{len(self._waiting)} of {self.size} ranks have joined (newest: {host})")
        ]
        if is_first:
            actions.append(Timer(self.start_timeout_s))
        if self.phase is Phase.JOINING:
            actions += self._abort_for_early_exits(now_s) or self._start_if_complete(now_s)
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

    def _abort_for_early_exits(self, now_s: float) -> List[Action]:
        """Abort if ranks wait for a process to join that has ended already."""
        found = self._waiting.ended_early(self._analysis) if self.phase is Phase.JOINING else None
        return [] if found is None else self._relay(self.epoch.abort("startup", *found), now_s)

    def _start_if_complete(self, now_s: float) -> List[Action]:
        if len(self._waiting) < self.size:
            return []
        try:
            ordered = self._waiting.assign_ranks()
        except Refusal as refusal:
            text = f"The job cannot start: {refusal}."
            return self._relay(self.epoch.abort("startup", text, None), now_s)
        before, evidence_s = self.epoch, EVIDENCE_S if self._ranks.seats else SETTLE_S
        self.epoch = Epoch(ordered, before.generation, before.known, self._analysis, evidence_s)
        return self._relay(self.epoch.begin(now_s), now_s)

    # ---- the end of a generation ---------------------------------------------------------------

    def _relay(self, actions: Sequence[Action], now_s: float) -> List[Action]:
        """The actions of a generation, as actions of the job."""
        result: List[Action] = []
        for action in actions:
            if isinstance(action, Notice) and action.kind == "failed" and self.abort_message is not None:
                result += [Send(connection, self.abort_message) for connection in self._waiting.connections]
            result.append(action)
            if isinstance(action, Notice) and action.kind == "ended":
                result += self._next_generation(now_s)
        return result

    def _next_generation(self, now_s: float) -> List[Action]:
        """Every rank has left without an error: start the job again if all of them wait already."""
        self._analysis.forget_reports()
        self.epoch = Epoch((), self.epoch.generation + 1, self.epoch.known, self._analysis)
        actions: List[Action] = []
        if self._waiting.restart_clock(now_s):
            actions.append(Timer(self.start_timeout_s))
        return actions + (self._abort_for_early_exits(now_s) or self._start_if_complete(now_s))
