"""One generation of a job as a state machine without I/O: its members connect, run, and end or fail together.

When a rank fails, its neighbours see their connections break, give up, and close their own; the first report
to arrive need not be about the first rank that failed. So reports are collected for a moment
(:class:`RootCauseAnalysis`), and the root cause is the rank that is reported lost and *has not reported
another rank lost itself*. That rank must not be running, though. So the rendezvous also asks every rank from
which peers it receives heartbeats. If the rank that others lost answers, or any rank still receives
heartbeats from it, then a link is at fault, and the root cause names the ranks that it connects.

Its members are chosen by :class:`~.state.Rendezvous`, whose view it is. Events go in (a member left,
disconnected, reported a failure), actions come out::

    PROBING  ->  LINKING  ->  RUNNING  ->  (all left) JOINING: there are no members
        \\____________\\____________\\__  ABORTED
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ..clock import is_due
from ..errors import ANOTHER_CALL, MismatchError, ProtocolError, interruption_text
from ..wire.auth import Claim
from ..wire.messages import Message
from .membership import EVIDENCE_S, NO_RELAY, SETTLE_S, Action, Notice, Process, RelayHost, Send, Timer
from .routing import Linking, NoRoute, link_table

_MAX_TOPICS = 16  # the maximum number of warnings that are passed on
_HERE_AND_THERE = re.compile(r"\((.*) here, (.*) there\)")
RENDEZVOUS = -1  # the reporter of the rendezvous' own observations
VANISHED = "its connections closed without a goodbye message"


class Phase(Enum):
    """The progress of a generation."""

    JOINING = "joining"
    PROBING = "probing"
    LINKING = "linking"
    RUNNING = "running"
    ABORTED = "aborted"


class Epoch:
    """One generation of a job. ``ordered``: the members in rank order, with ranks, hosts and local ranks."""

    def __init__(
        self,
        ordered: Sequence[Process] = (),
        generation: int = 0,
        exits: Mapping[int, Tuple[str, bool]] = {},  # noqa: B006  how processes have ended before, by number
        evidence_s: float = SETTLE_S,  # time for the launcher's report after a control connection ended
        relay: RelayHost = NO_RELAY,
    ) -> None:
        self.generation = generation
        self.phase = Phase.JOINING
        # By the number of the control connection.
        self.members: Dict[int, Process] = {member.connection: member for member in ordered}
        self.abort_message: Optional[Message] = None  # sent to every member when it failed
        self.had_started = False  # it was running when it failed
        self.apart: Tuple[int, ...] = ()  # ranks without a route or link between them, or with a broken one
        self._analysis = RootCauseAnalysis(exits)
        self._evidence_s = evidence_s
        self._by_rank = {member.rank: member for member in ordered}
        self._by_number = {member.number: member for member in ordered}
        self._staying = set(self._by_number)
        self._linking = Linking(ordered, generation, relay)
        self._warned: Set[str] = set()

    @property
    def is_linking(self) -> bool:
        """Return whether its members are connecting."""
        return self.phase in (Phase.PROBING, Phase.LINKING)

    def begin(self) -> List[Action]:
        """Start connecting the members."""
        self.phase = Phase.PROBING
        return self._linking.begin() + self._link_if_probed()

    def handle(self, connection: int, message: Message, now_s: float) -> List[Action]:
        """Handle a message, without effect if it is late or not a member's; raises ProtocolError."""
        if message["type"] not in _HANDLERS:
            raise ProtocolError(f"a rank may not send {message['type']!r}")
        handler, phases = _HANDLERS[message["type"]]
        member = self.members.get(connection)
        return [] if member is None or self.phase not in phases else handler(self, member, message, now_s)

    def silent(self, rank: int, silent_s: float) -> List[Action]:
        """Abort because a member does not answer pings, while links are built or some ranks have left."""
        running = self.phase is Phase.RUNNING
        when = "others have left already" if running else "links were being built"
        member = self._by_rank[rank]
        text = (
            f"{member.name()} has been silent for {silent_s:.0f} s while {when}: its process is stopped, "
            "swapped out or cut off, or a C call keeps the interpreter lock (RINGCOMM_DEAD_AFTER sets the "
            "limit)."
        )
        return self._abort_for(RootCause("stalled", text, member))

    def answered(self, member: Process, message: Message, now_s: float) -> List[Action]:
        """Take a member's answer to a ping: the peers with and without heartbeats."""
        member.asked = False
        self._analysis.answered(member.rank, message["heard"], message["silent"])
        return []

    # ---- probing and linking -----------------------------------------------------------------

    def probed(self, member: Process, message: Message, now_s: float) -> List[Action]:
        return self._linking.probed(member, message) + self._link_if_probed()

    def measured(self, member: Process, message: Message, now_s: float) -> List[Action]:
        return self._linking.measured(member, message) + self._link_if_probed()

    def _link_if_probed(self) -> List[Action]:
        if not self._linking.probed_all:
            return []
        try:
            actions = self._linking.link()
        except NoRoute as problem:
            self.apart = problem.ranks
            return self.abort("no_route", str(problem), None)
        self.phase = Phase.LINKING
        text = self._linking.relayed_text()
        return [*actions, Notice("warning", text, detail={"topic": "relayed"})] if text else actions

    def relays(self, link: Claim) -> bool:
        """Return whether this link is about to be made, and is relayed."""
        current = self.phase is Phase.LINKING and link.generation == self.generation
        return current and self._linking.relays(link.source, link.target)

    def linked(self, member: Process, message: Message, now_s: float) -> List[Action]:
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

    def unlinked(self, member: Process, message: Message, now_s: float) -> List[Action]:
        """Note that a rank could not build a link. If its peer has ended, a report of that follows soon."""
        self.apart = member.rank, int(message["peer"])
        report = {**message, "doing": "", "why": message["reason"], "kind": "unlinked"}
        return self.lost(member, report, now_s)

    # ---- failures ----------------------------------------------------------------------------

    def lost(self, member: Process, message: Message, now_s: float) -> List[Action]:
        """Take a rank's report that it lost another."""
        peer = self._by_rank.get(int(message["peer"]))
        if peer is None:
            return []
        known = not peer.is_present or message["kind"] in ("stalled", "late")
        wait_s = SETTLE_S if known else EVIDENCE_S  # for better evidence
        doing, why, kind = message["doing"], message["why"], message["kind"]
        self._analysis.suspect(Suspicion(member.rank, peer.rank, doing, why, kind, now_s + wait_s))
        # Ask every member from which peers it receives heartbeats, and from which it does not. After a loss
        # all ranks report at the same time. A rank that has not answered yet is not asked again, or a
        # thousand reports would have a thousand ranks answer a thousand times.
        asked = [item for item in self.members.values() if item.is_present and not item.asked]
        for item in asked:
            item.asked = True
        return [*(Send(item.connection, {"type": "ping"}) for item in asked), Timer(wait_s)]

    def closed(self, member: Process, message: Message, now_s: float) -> List[Action]:
        return self.lost(member, {**message, "doing": "", "kind": "closed"}, now_s)

    def interrupted(self, member: Process, message: Message, now_s: float) -> List[Action]:
        """Note that a rank has left a collective half-way. Its program may go on, or end soon."""
        doing, why, due_s = str(message["doing"]), str(message["why"]), now_s + SETTLE_S
        self._analysis.suspect(Suspicion(RENDEZVOUS, member.rank, doing, why, "interrupted", due_s))
        return [Timer(SETTLE_S)]

    def mismatched(self, member: Process, message: Message, now_s: float) -> List[Action]:
        self._analysis.mismatch(member.rank, str(message["text"]), now_s)
        return [Timer(SETTLE_S)]

    def told(self, member: Process, message: Message, now_s: float) -> List[Action]:
        """Pass on a rank's note or warning to the user; of several warnings of one topic only the first."""
        if message["type"] == "note":
            return [Notice("note", message["text"])]
        topic = str(message["topic"])
        if topic in self._warned or len(self._warned) >= _MAX_TOPICS:
            return []
        self._warned.add(topic)
        return [Notice("warning", message["text"], detail={"topic": topic})]

    def leaving(self, member: Process, message: Message, now_s: float) -> List[Action]:
        """Note that a rank leaves: it shut down, or its program ended."""
        self._mark_left(member, str(message["reason"]))
        if self.phase is Phase.ABORTED:
            return []
        if not message["ok"]:
            member.gone = member.left
        if not message["ok"] or self.is_linking:
            return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        return self._end_if_all_left()

    def left_for_next_view(self, connection: int) -> None:
        """Note that a rank has ended its part in this generation to take part in the next one."""
        member = self.members.get(connection)
        if member is not None and member.left is None and self.phase is Phase.RUNNING:
            self._mark_left(member, "it has asked for the next view")

    def _mark_left(self, member: Process, why: str) -> None:
        member.left = why
        self._staying.discard(member.number)

    @property
    def some_have_left(self) -> bool:
        """Return whether it is running, without some of its ranks."""
        return self.phase is Phase.RUNNING and len(self._staying) < len(self.members)

    def disconnected(self, connection: int, now_s: float) -> List[Action]:
        member = self.members.get(connection)
        if member is None or not member.is_present:
            return []
        member.gone = self._analysis.exit_of(member.number) or VANISHED
        if self.phase is Phase.ABORTED:
            return []
        if member.gone != VANISHED:
            return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        # The launcher usually reports within moments how the process ended, which is more informative.
        due_s = now_s + self._evidence_s
        self._analysis.suspect(Suspicion(RENDEZVOUS, member.rank, "", "", "vanished", due_s))
        return [Timer(self._evidence_s)]

    def process_exited(self, number: int, how: str, ok: bool, now_s: float) -> List[Action]:
        member = self._by_number.get(number)
        if member is None:
            return []
        self._analysis.exited(number, how, ok)
        if self.phase is Phase.ABORTED:
            return []
        if ok and member.left is None and self.phase is Phase.RUNNING:
            # Its goodbye may still be on its way, over a slower wire than the launcher's report.
            self._mark_left(member, how)
            return self._end_if_all_left()
        if member.left is None or not ok:
            # A rank that has left may still have failed after that; the error of waiting ranks says how.
            member.gone = how
            if member.left is None:
                return self._abort_for(self._analysis.root_cause_of(self._by_rank, member))
        return []

    def tick(self, now_s: float) -> List[Action]:
        if self.phase in (Phase.JOINING, Phase.ABORTED):
            return []
        root_cause = self._analysis.due(self._by_rank, now_s)
        return [] if root_cause is None else self._abort_for(root_cause)

    def _abort_for(self, cause: RootCause) -> List[Action]:
        culprit = cause.culprit
        rank, host = (None, None) if culprit is None else (culprit.rank, culprit.host)
        return self.abort(cause.kind, cause.text, rank, host, cause.separated)

    def abort(
        self, kind: str, text: str, culprit: Optional[int], host: Optional[str] = None,
        separated: Sequence[Process] = (),
    ) -> List[Action]:  # fmt: skip
        """End the generation with an error, which every member is sent. ``culprit``: the rank at fault;
        ``separated``: the members whose link was cut.
        """
        self.had_started = self.phase is Phase.RUNNING
        self.phase = Phase.ABORTED
        self.abort_message = {"type": "abort", "kind": kind, "text": text, "rank": culprit, "host": host}
        if separated:
            self.apart = tuple(member.rank for member in separated)
            self.abort_message["ranks"] = list(self.apart)
            self.abort_message["hosts"] = [member.host for member in separated]
        actions: List[Action] = [Send(connection, self.abort_message) for connection in self.members]
        member = self._by_rank.get(-1 if culprit is None else culprit)
        leaving = member is not None and member.left is not None
        actions.append(Notice("failed", text, culprit=culprit, detail={"kind": kind, "leaving": leaving}))
        return actions

    def _end_if_all_left(self) -> List[Action]:
        """Remove the members once all of them have left without an error."""
        if self._staying:
            return []
        self.members, self._by_rank, self._by_number = {}, {}, {}
        self.phase = Phase.JOINING
        return [Notice("ended", "every rank has left")]


Handler = Callable[[Epoch, Process, Message, float], List[Action]]

_ALWAYS = tuple(Phase)
_UNTIL_ABORTED = tuple(phase for phase in Phase if phase is not Phase.ABORTED)

_HANDLERS: Dict[str, Tuple[Handler, Tuple[Phase, ...]]] = {
    "probed": (Epoch.probed, (Phase.PROBING,)), "measured": (Epoch.measured, (Phase.PROBING,)),
    "linked": (Epoch.linked, (Phase.LINKING,)), "unlinked": (Epoch.unlinked, _UNTIL_ABORTED),
    "lost": (Epoch.lost, _UNTIL_ABORTED), "mismatch": (Epoch.mismatched, _UNTIL_ABORTED),
    "note": (Epoch.told, _ALWAYS), "warning": (Epoch.told, _ALWAYS), "closed": (Epoch.closed, _UNTIL_ABORTED),
    "interrupted": (Epoch.interrupted, _UNTIL_ABORTED), "pong": (Epoch.answered, _ALWAYS),
    "leaving": (Epoch.leaving, _ALWAYS),
}  # fmt: skip
"""The messages that members may send: their handlers, and the phases in which they have an effect."""


# ---- the root cause ------------------------------------------------------------------------------


class Suspicion(NamedTuple):
    """A report that a rank is lost. ``kind``: ``vanished``: its control connection ended; ``interrupted``: it
    has left a collective half-way (``doing``); ``closed``: an idle link to it ended; ``unlinked``: it was
    never reached; otherwise as in :meth:`~ringcomm.rendezvous.control.ControlChannel.report_lost`.
    """

    reporter: int  # the rank that lost it, or ``RENDEZVOUS``
    peer: int  # the rank that is lost
    doing: str  # the collective that the reporter was in, or empty
    why: str
    kind: str
    due_s: float  # when to determine the root cause, on the rendezvous' monotonic clock


class RootCause(NamedTuple):
    """Why the job has failed; sent to every rank."""

    kind: str
    text: str
    culprit: Optional[Process]  # the rank at fault, if it can be determined
    separated: Tuple[Process, ...] = ()  # for ``cut``: ranks that do not receive each other's messages


_SILENT_KINDS = ("silent", "still", "cut off")
_ABOUT_LINKS = ("lost", "closed", *_SILENT_KINDS)
_FACTS = ("vanished", "interrupted")
Pair = FrozenSet[int]
Ranges = Sequence[Sequence[int]]
"""Ranks as ranges, each its first and its last: nearly all ranks are one or two."""


class RootCauseAnalysis:
    """Collects the failure reports of one generation and determines the root cause."""

    def __init__(self, exits: Mapping[int, Tuple[str, bool]] = {}) -> None:  # noqa: B006
        self._exits = dict(exits)  # how processes have ended, and whether normally, by member number
        self._suspicions: List[Suspicion] = []
        self._mismatches: Dict[int, str] = {}
        self._mismatch_due_s = 0.0
        self._heartbeats: Dict[int, Tuple[Ranges, Ranges]] = {}

    def answered(self, rank: int, heard: Ranges, silent: Ranges) -> None:
        """Record from which peers a rank has received recent heartbeats. It is asked after every report."""
        self._heartbeats[rank] = heard, silent

    def exited(self, number: int, how: str, ok: bool) -> None:
        self._exits[number] = how, ok

    def exit_of(self, number: int) -> Optional[str]:
        """Return how the process with this member number ended, or None if it has not."""
        return self._exits[number][0] if number in self._exits else None

    def suspect(self, suspicion: Suspicion) -> None:
        if not self._suspicions:
            self._heartbeats.clear()  # Heartbeats received before the first report prove nothing now.
        self._suspicions.append(suspicion)

    def mismatch(self, rank: int, text: str, now_s: float) -> None:
        if not self._mismatches:
            self._mismatch_due_s = now_s + SETTLE_S
        self._mismatches[rank] = text

    def due(self, members: Mapping[int, Process], now_s: float) -> Optional[RootCause]:
        """Return the root cause; None while there is none, or more reports may come."""
        if self._mismatches and is_due(self._mismatch_due_s, now_s):
            lines = ["The ranks do not make the same call.", *_grouped(self._mismatches)]
            return RootCause("mismatch", "\n".join(lines), None)
        # A rank that has left may close its links at any time.
        self._suspicions = [
            item for item in self._suspicions if item.kind != "closed" or members[item.peer].left is None
        ]
        due = [item for item in self._suspicions if is_due(item.due_s, now_s)]
        if due:
            # The rendezvous' own observations come before reports of ranks about others.
            facts = [item for item in self._suspicions if item.kind in _FACTS]
            return self._trace(members, (facts or due)[0].peer)
        return None

    def _trace(self, members: Mapping[int, Process], lost: int) -> RootCause:
        """Follow the reports from a lost rank to the rank that it lost before, and so on to the first."""
        seen: Set[int] = set()
        while lost not in seen:
            seen.add(lost)
            earlier = next(
                (item for item in self._suspicions if item.reporter == lost and item.peer not in seen), None
            )
            if earlier is None or members[lost].gone == VANISHED:
                break
            lost = earlier.peer
        running = members[lost].is_present
        unlinked = [item for item in self._suspicions if item.peer == lost and item.kind == "unlinked"]
        if unlinked and running:
            name = members[unlinked[0].reporter].name()
            return RootCause("no_route", f"{name} could not connect to all ranks: {unlinked[0].why}.", None)
        pairs = set() if self._interruption(lost) else self._cut_from(members, lost)
        return _cut(members, pairs, self._why(lost)) if pairs else self.root_cause_of(members, members[lost])

    def _cut_from(self, members: Mapping[int, Process], lost: int) -> Set[Pair]:
        """Return the pairs of ranks whose links are broken, if this rank is running; otherwise none."""
        about = [item for item in self._suspicions if item.peer == lost and item.kind in _ABOUT_LINKS]
        if not about or not members[lost].is_present:
            return set()
        here = {rank for rank, member in members.items() if member.is_present}
        if lost not in self._heartbeats:
            silent = any(item.kind in _SILENT_KINDS for item in about)
            ranges = (item for heard, _ in self._heartbeats.values() for item in heard)
            if not silent or not any(first <= lost <= last for first, last in ranges):
                return set()
        pairs = {
            frozenset((item.reporter, item.peer))
            for item in self._suspicions
            if item.kind in _ABOUT_LINKS and item.reporter != RENDEZVOUS
        }
        most = max(here, default=-1)
        for rank, (_, unheard) in self._heartbeats.items():
            peers = (peer for first, last in unheard for peer in range(first, min(last, most) + 1))
            pairs |= {frozenset((rank, peer)) for peer in peers}
        return {pair for pair in pairs if pair <= here}

    def _interruption(self, lost: int) -> Optional[Suspicion]:
        """Return a rank's own report that it left a collective half-way, if there is one."""
        own = (item for item in self._suspicions if item.peer == lost and item.kind == "interrupted")
        return next(own, None)

    def _why(self, lost: int) -> str:
        reasons = (item.why for item in self._suspicions if item.peer == lost and item.why)
        return next(reasons, "").rstrip(".")

    def _doing(self, lost: int) -> str:
        """Return the collective of the lowest rank that lost this one in one, or else any other."""
        busy = [item for item in self._suspicions if item.doing]
        return min(busy, key=lambda item: (item.peer != lost, item.reporter)).doing if busy else ""

    def root_cause_of(self, members: Mapping[int, Process], culprit: Process) -> RootCause:
        """Return the root cause that names this member as the rank at fault."""
        interruption = self._interruption(culprit.rank)
        if interruption is not None and culprit.gone is None:
            text = interruption_text(culprit.name(), interruption.why, interruption.doing)
            since = "" if culprit.left is None else f" Since then it has left the job ({culprit.left})."
            return RootCause("lost", text + since, culprit)
        doing = self._doing(culprit.rank)
        during = f" while others were in {doing}" if doing else ""
        about = [item for item in self._suspicions if item.peer == culprit.rank]
        reports = [item for item in about if item.reporter != RENDEZVOUS]
        cause = culprit.gone or culprit.left or VANISHED
        if reports and culprit.is_present:
            cause = f"{members[reports[0].reporter].name()} reports: {reports[0].why}"
        how = self.exit_of(culprit.number)
        if how is not None and how not in cause:
            cause = f"{cause}, {how}"
        cause = cause.rstrip(".")
        if culprit.left is not None and culprit.gone is None:
            text = (
                f"{culprit.name()} has finished ({cause}){during}. Every rank must make the same calls "
                "before it ends; one that has less data can call join() (PyTorch's DDP: `model.join()`)."
            )
            return RootCause("lost", text, culprit)
        if reports and culprit.gone is None and reports[0].kind == "late":
            return RootCause("stalled", f"{culprit.name()} is late{during}: {cause}.", culprit)
        if reports and culprit.gone is None and reports[0].kind not in ("lost", "closed"):
            return RootCause("stalled", f"{culprit.name()} is silent{during}: {cause}.", culprit)
        # A defect of the program is not a loss: another attempt would fail again.
        kind = "mismatch" if cause.startswith(f"uncaught {MismatchError.__name__}:") else "lost"
        return RootCause(kind, f"{culprit.name()} was lost{during}: {cause}.", culprit)


def _cut(members: Mapping[int, Process], pairs: Set[Pair], why: str) -> RootCause:
    """Return the root cause if running ranks do not receive each other's messages."""
    separated = sorted({rank for pair in pairs for rank in pair})
    hosts = {members[rank].host for rank in separated}
    between = [{members[rank].host for rank in pair} for pair in pairs]
    alone = [host for host in hosts if all(host in pair for pair in between)]
    if len(hosts) > 2 and len(alone) == 1:
        ranks = [rank for rank in separated if members[rank].host == alone[0]]
        others = _names(members, [rank for rank in separated if rank not in ranks])
        verb = "is" if len(ranks) == 1 else "are"
        text = f"{_names(members, ranks)} {verb} cut off from {others}, but not from the rendezvous: {why}."
        return RootCause("stalled", text, members[ranks[0]])
    where = (
        f"The network between {' and '.join(sorted(hosts))} is broken or blocks TCP: check cables, switches "
        "and firewalls."
        if len(hosts) > 1
        else f"All of them are on {min(hosts)}: that host is overloaded or was suspended for a while. "
        "--dead-after sets how long ranks may be silent."
    )
    return RootCause(
        "cut",
        f"{_names(members, separated)} are running, but do not receive each other's messages: {why}. {where}",
        None,
        tuple(members[rank] for rank in separated),
    )


def _names(members: Mapping[int, Process], ranks: List[int]) -> str:
    """Return the ranks as text, such as ``rank 1 (jetson1) and rank 2 (jetson2)``."""
    return " and ".join(members[rank].name() for rank in ranks)


def _grouped(texts: Mapping[int, str]) -> List[str]:
    """Return lines from texts by rank: one for each call, each difference once unless a peer reports nothing.
    """
    lines: List[str] = []
    calls: Dict[str, List[int]] = {}
    differences: Dict[str, List[str]] = {}
    seen: Set[str] = set()
    for rank in sorted(texts):
        start = f"rank {rank}: "
        if not texts[rank].startswith(start):
            lines.append(texts[rank])
            continue
        text = texts[rank][len(start) :]
        found = ANOTHER_CALL.search(text)
        call = text[: found.start()] if found is not None else text.rstrip(".")
        calls.setdefault(call, []).append(rank)
        if found is not None:
            why = text[found.end() :]
            if why not in seen or int(found[1]) not in texts:
                differences.setdefault(call, []).append(text[found.start() :].rstrip("."))
            seen |= {why, _HERE_AND_THERE.sub(r"(\2 here, \1 there)", why)}
    return lines + [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {call}"
        f"{''.join(differences.get(call, ()))}."
        for call, ranks in calls.items()
    ]
