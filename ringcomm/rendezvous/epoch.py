"""One generation of a job as a state machine without I/O: its members connect, run, and end or fail together.

Its members are chosen by :class:`~.state.Rendezvous`, whose view it is. Events go in (a member left,
disconnected, reported a failure), actions come out::

    PROBING  ->  LINKING  ->  RUNNING  ->  (all left) JOINING: there are no members
        \\____________\\____________\\__  ABORTED
"""

from __future__ import annotations

from enum import Enum
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ..clock import is_due
from ..errors import ProtocolError
from ..wire.auth import Claim
from ..wire.messages import Message
from .membership import Action, Member, Notice, Send, Timer
from .root_cause import SETTLE_S, VANISHED, RootCause, RootCauseAnalysis, silence
from .routing import NO_RELAY, Known, Linking, NoRoute, RelayHost, link_table

_MAX_TOPICS = 16
"""The maximum number of warnings that are passed on."""
PINGS_PER_LIMIT = 6
"""Number of pings within the time after which a silent process counts as failed."""


class Phase(Enum):
    """The progress of a generation."""

    JOINING = "joining"
    PROBING = "probing"
    LINKING = "linking"
    RUNNING = "running"
    ABORTED = "aborted"


class Epoch:
    """One generation of a job. ``ordered``: the members in rank order, with ranks, hosts and local ranks
    assigned; ``known``: speeds measured between hosts before.
    """

    def __init__(
        self,
        ordered: Sequence[Member] = (),
        generation: int = 0,
        known: Optional[Known] = None,
        exits: Mapping[int, Tuple[str, bool]] = {},  # noqa: B006  how processes have ended before, by number
        evidence_s: float = SETTLE_S,  # time for the launcher's report after a control connection ended
        relay: RelayHost = NO_RELAY,
    ) -> None:
        self.generation = generation
        self.phase = Phase.JOINING
        # By the number of the control connection.
        self.members: Dict[int, Member] = {member.connection: member for member in ordered}
        self.abort_message: Optional[Message] = None  # sent to every member when it failed
        self.had_started = False  # it was running when it failed
        self.unreachable: Tuple[int, ...] = ()  # two ranks without a route or link between them
        self.known: Known = {} if known is None else known
        self._analysis = RootCauseAnalysis(exits)
        self._evidence_s = evidence_s
        self._by_rank = {member.rank: member for member in ordered}
        self._by_number = {member.number: member for member in ordered}
        self._staying: Set[int] = set(self.members)
        self._linking = Linking(ordered, generation, self.known, relay)
        self._warned: Set[str] = set()

    @property
    def is_linking(self) -> bool:
        """Return whether its members are connecting."""
        return self.phase in (Phase.PROBING, Phase.LINKING)

    def begin(self, now_s: float) -> List[Action]:
        """Start connecting the members."""
        self.phase = Phase.PROBING
        for member in self.members.values():
            member.heard_s = now_s
        return self._linking.begin() + self._listen(now_s) + self._link_if_probed()

    def handle(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """Handle a message; it has no effect if it comes too late, or not from a member. Raises ProtocolError
        if ranks may not send it.
        """
        if message["type"] not in _HANDLERS:
            raise ProtocolError(f"a rank may not send {message['type']!r}")
        handler, phases = _HANDLERS[message["type"]]
        member = self.members.get(connection)
        return [] if member is None or self.phase not in phases else handler(self, member, message, now_s)

    def _listen(self, now_s: float) -> List[Action]:
        """Ping every member, or abort if one has not answered for too long.

        While the job runs, ranks exchange heartbeats with each other. The rendezvous pings them while links
        are built, and when the first ranks have left: the last rank has no peer that would notice.
        """
        here = [item for item in self._by_rank.values() if item.is_here and item.dead_after_s]
        if not here:
            return []
        limit_s = min(member.dead_after_s for member in here)
        silent = min(here, key=lambda member: member.heard_s)
        if is_due(silent.heard_s + limit_s, now_s):
            running = self.phase is Phase.RUNNING
            when = "others have left already" if running else "links were being built"
            return self._abort_for(silence(silent, now_s - silent.heard_s, when))
        pings = [Send(member.connection, {"type": "ping"}) for member in here]
        return [*pings, Timer(limit_s / PINGS_PER_LIMIT)]

    def answered(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Take a member's answer to a ping: the peers with and without heartbeats."""
        member.heard_s, member.asked = now_s, False
        self._analysis.answered(member.rank, message["heard"], message["silent"])
        return []

    # ---- probing and linking -----------------------------------------------------------------

    def probed(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Take the attempts of a host's first rank."""
        return self._linking.probed(member, message) + self._link_if_probed()

    def measured(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Take the measurements of a host's first rank."""
        return self._linking.measured(member, message) + self._link_if_probed()

    def _link_if_probed(self) -> List[Action]:
        if not self._linking.probed_all:
            return []
        try:
            actions = self._linking.link()
        except NoRoute as problem:
            self.unreachable = problem.ranks
            return self.abort("no_route", str(problem), None)
        self.known = self._linking.known()
        self.phase = Phase.LINKING
        text = self._linking.relayed_text()
        return [*actions, Notice("warning", text, detail={"topic": "relayed"})] if text else actions

    def relays(self, link: Claim) -> bool:
        """Return whether this link is about to be made, and is relayed."""
        current = self.phase is Phase.LINKING and link.generation == self.generation
        return current and self._linking.relays(link.source, link.target)

    def linked(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Note that a rank has an authenticated link to every other."""
        if not self._linking.linked(member, message["links"]):
            return []
        self.phase = Phase.RUNNING
        rows = self._linking.rows()
        table = link_table(rows, len(self.members))  # Only rank 0 logs it.
        told = ((item.connection, "" if item.rank else table) for item in self.members.values())
        more = {"relayed": self._linking.relayed_hosts()}
        actions: List[Action] = [Send(to, {"type": "go", "table": text, **more}) for to, text in told]
        actions.append(Notice("started", table, detail={"links": rows, "generation": self.generation}))
        return actions

    def unlinked(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Note that a rank could not build a link. If its peer has ended, a report of that follows soon."""
        self.unreachable = member.rank, int(message["peer"])
        report = {**message, "doing": "", "why": message["reason"], "kind": "unlinked"}
        return self.lost(member, report, now_s)

    # ---- failures ----------------------------------------------------------------------------

    def lost(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Take a rank's report that it lost another."""
        peer = self._by_rank.get(int(message["peer"]))
        if peer is None:
            return []
        wait_s = self._analysis.lost(member.rank, peer, message, now_s)
        # Ask every member from which peers it receives heartbeats, and from which it does not. After a loss
        # all ranks report at the same time. A rank that has not answered yet is not asked again, or a
        # thousand reports would have a thousand ranks answer a thousand times.
        asked = [item for item in self.members.values() if item.is_here and not item.asked]
        for item in asked:
            item.asked = True
        return [*(Send(item.connection, {"type": "ping"}) for item in asked), Timer(wait_s)]

    def closed(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Note that an idle link between two ranks ended without a goodbye."""
        return self.lost(member, {**message, "doing": "", "kind": "closed"}, now_s)

    def interrupted(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Note that a rank has left a collective half-way. Its program may go on, or end soon."""
        self._analysis.interrupted(member.rank, message, now_s)
        return [Timer(SETTLE_S)]

    def mismatched(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Take a rank's report that another one is in a different call."""
        self._analysis.mismatch(member.rank, str(message["text"]), now_s)
        return [Timer(SETTLE_S)]

    def told(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Pass on a rank's note or warning to the user; of several warnings of one topic only the first."""
        if message["type"] == "note":
            return [Notice("note", message["text"])]
        topic = str(message["topic"])
        if topic in self._warned or len(self._warned) >= _MAX_TOPICS:
            return []
        self._warned.add(topic)
        return [Notice("warning", message["text"], detail={"topic": topic})]

    def leaving(self, member: Member, message: Message, now_s: float) -> List[Action]:
        """Note that a rank leaves: it shut down, or its program ended."""
        self._mark_left(member, str(message["reason"]))
        if self.phase is Phase.ABORTED:
            return []
        if not message["ok"]:
            member.gone = member.left
            return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        if self.phase in (Phase.PROBING, Phase.LINKING):
            return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        return self._end_if_all_left(now_s)

    def left_for_next_view(self, connection: int, now_s: float) -> List[Action]:
        """Note that a rank has ended its part in this generation to take part in the next one.

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

    @property
    def apart(self) -> Sequence[int]:
        """Return the ranks that do not reach each other, if that has ended it; otherwise empty."""
        abort = self.abort_message or {}
        ranks: Sequence[int] = abort.get("ranks", ())
        return ranks or self.unreachable

    def disconnected(self, connection: int, now_s: float) -> List[Action]:
        """Note that a control connection ended."""
        member = self.members.get(connection)
        if member is None or not member.is_here:
            return []
        member.gone = self._analysis.exit_of(member.number) or VANISHED
        if self.phase is Phase.ABORTED:
            return []
        if member.gone != VANISHED:
            return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        # The launcher usually reports within moments how the process ended, which is more informative.
        self._analysis.vanished(member.rank, self._evidence_s, now_s)
        return [Timer(self._evidence_s)]

    def process_exited(self, number: int, how: str, ok: bool, now_s: float) -> List[Action]:
        """Note the launcher's report that a process has ended."""
        member = self._by_number.get(number)
        if member is None:
            return []
        self._analysis.exited(number, how, ok)
        if self.phase is Phase.ABORTED:
            return []
        if ok and member.left is None and self.phase is Phase.RUNNING:
            # Its goodbye may still be on its way, over a slower wire than the launcher's report.
            self._mark_left(member, how)
            return self._end_if_all_left(now_s)
        if member.left is None or not ok:
            # A rank that has left may still have failed after that; the error of waiting ranks says how.
            member.gone = how
            if member.left is None:
                return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        return []

    def tick(self, now_s: float) -> List[Action]:
        """Act on what is due."""
        if self.phase in (Phase.JOINING, Phase.ABORTED):
            return []
        root_cause = self._analysis.due(self._by_rank, now_s)
        if root_cause is not None:
            return self._abort_for(root_cause)
        return self._listen(now_s) if self.is_linking or self._some_have_left() else []

    def _abort_for(self, cause: RootCause) -> List[Action]:
        culprit = cause.culprit
        rank, host = (None, None) if culprit is None else (culprit.rank, culprit.host)
        return self.abort(cause.kind, cause.text, rank, host, cause.separated)

    def abort(
        self,
        kind: str,
        text: str,
        culprit: Optional[int],
        host: Optional[str] = None,
        separated: Sequence[Member] = (),
    ) -> List[Action]:
        """End the generation with an error, which every member is sent. ``kind``: see
        :func:`~.control.error_from`; ``culprit``: the rank at fault; ``separated``: the members whose link
        was cut.
        """
        self.had_started = self.phase is Phase.RUNNING
        self.phase = Phase.ABORTED
        self.abort_message = {"type": "abort", "kind": kind, "text": text, "rank": culprit, "host": host}
        if separated:
            self.abort_message["ranks"] = [member.rank for member in separated]
            self.abort_message["hosts"] = [member.host for member in separated]
        actions: List[Action] = [Send(connection, self.abort_message) for connection in self.members]
        member = self._by_rank.get(-1 if culprit is None else culprit)
        leaving = member is not None and member.left is not None
        actions.append(Notice("failed", text, culprit=culprit, detail={"kind": kind, "leaving": leaving}))
        return actions

    def _end_if_all_left(self, now_s: float) -> List[Action]:
        """Remove the members once all of them have left without an error."""
        if not self._staying:
            self.members, self._by_rank, self._by_number = {}, {}, {}
            self.phase = Phase.JOINING
            return [Notice("ended", "every rank has left")]
        if len(self._staying) + 1 < len(self.members):
            return []
        for connection in self._staying:
            self.members[connection].heard_s = now_s
        return self._listen(now_s)


Handler = Callable[[Epoch, Member, Message, float], List[Action]]

_ALWAYS = tuple(Phase)
_UNTIL_ABORTED = tuple(phase for phase in Phase if phase is not Phase.ABORTED)

_HANDLERS: Dict[str, Tuple[Handler, Tuple[Phase, ...]]] = {
    "probed": (Epoch.probed, (Phase.PROBING,)),
    "measured": (Epoch.measured, (Phase.PROBING,)),
    "linked": (Epoch.linked, (Phase.LINKING,)),
    "unlinked": (Epoch.unlinked, _UNTIL_ABORTED),
    "lost": (Epoch.lost, _UNTIL_ABORTED),
    "mismatch": (Epoch.mismatched, _UNTIL_ABORTED),
    "note": (Epoch.told, _ALWAYS),
    "warning": (Epoch.told, _ALWAYS),
    "closed": (Epoch.closed, _UNTIL_ABORTED),
    "interrupted": (Epoch.interrupted, _UNTIL_ABORTED),
    "pong": (Epoch.answered, _ALWAYS),
    "leaving": (Epoch.leaving, _ALWAYS),
}
"""The messages that members may send: their handlers, and the phases in which they have an effect."""
