"""Root-cause analysis: derives one root cause from the failure reports of all ranks.

When a rank fails, its neighbours see their connections break, give up, and close their own; the
first report to arrive need not be about the first rank that failed. So reports are collected for a
moment, and the root cause is the rank that is reported lost and *has not reported another rank lost itself*.

That rank must not be running, though. So the rendezvous also asks every rank from which peers it receives
heartbeats. If the rank that others lost answers, or any rank still receives heartbeats from it, then a link
is at fault, and the root cause names the ranks that it connects.
"""

from __future__ import annotations

import re
from typing import Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ..clock import is_due
from ..errors import ANOTHER_CALL, MismatchError, interruption_text
from ..wire.messages import Message
from .membership import Member

EVIDENCE_S = 1.0
"""How long to wait for other reports if the only evidence is a broken connection."""
SETTLE_S = 0.3
"""How long to wait for other reports that may name an earlier cause."""
_HERE_AND_THERE = re.compile(r"\((.*) here, (.*) there\)")

RENDEZVOUS = -1
"""The reporter of the rendezvous' own observations."""
VANISHED = "its connections closed without a goodbye message"


class Suspicion(NamedTuple):
    """A report that a rank is lost.

    ``kind``: ``vanished``: its control connection ended; ``interrupted``: it has reported itself that it left
    a collective half-way (then ``doing`` is its own); ``closed``: an idle link to it ended; ``unlinked``: it
    was never reached; otherwise as in :meth:`~ringcomm.rendezvous.control.ControlChannel.report_lost`.
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
    culprit: Optional[Member]  # the rank at fault, if it can be determined
    separated: Tuple[Member, ...] = ()  # for ``cut``: ranks that do not receive each other's messages


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
        """Record how a process ended, as the launcher reports it."""
        self._exits[number] = how, ok

    def exit_of(self, number: int) -> Optional[str]:
        """Return how the process with this member number ended, or None if it has not."""
        return self._exits[number][0] if number in self._exits else None

    def suspect(self, suspicion: Suspicion) -> None:
        """Record a report that a rank is lost."""
        if not self._suspicions:
            self._heartbeats.clear()  # Heartbeats received before the first report prove nothing now.
        self._suspicions.append(suspicion)

    def lost(self, reporter: int, peer: Member, message: Message, now_s: float) -> float:
        """Record a rank's report that it lost another; return the seconds to wait for better evidence."""
        known = peer.gone is not None or peer.left is not None or message["kind"] in ("stalled", "late")
        wait_s = SETTLE_S if known else EVIDENCE_S
        doing, why, kind = message["doing"], message["why"], message["kind"]
        self.suspect(Suspicion(reporter, peer.rank, doing, why, kind, now_s + wait_s))
        return wait_s

    def interrupted(self, rank: int, message: Message, now_s: float) -> None:
        """Record a rank's report that it has left a collective half-way."""
        doing, why, due_s = str(message["doing"]), str(message["why"]), now_s + SETTLE_S
        self.suspect(Suspicion(RENDEZVOUS, rank, doing, why, "interrupted", due_s))

    def vanished(self, rank: int, wait_s: float, now_s: float) -> None:
        """Record that the control connection of a rank has ended. ``wait_s``: for the launcher's report."""
        self.suspect(Suspicion(RENDEZVOUS, rank, "", "", "vanished", now_s + wait_s))

    def mismatch(self, rank: int, text: str, now_s: float) -> None:
        """Record a report that another rank makes a different call."""
        if not self._mismatches:
            self._mismatch_due_s = now_s + SETTLE_S
        self._mismatches[rank] = text

    def due(self, members: Mapping[int, Member], now_s: float) -> Optional[RootCause]:
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

    def _trace(self, members: Mapping[int, Member], lost: int) -> RootCause:
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
        running = members[lost].is_here
        unlinked = [item for item in self._suspicions if item.peer == lost and item.kind == "unlinked"]
        if unlinked and running:
            name = members[unlinked[0].reporter].name()
            return RootCause("no_route", f"{name} could not connect to all ranks: {unlinked[0].why}.", None)
        pairs = set() if self._interruption(lost) else self._cut_from(members, lost)
        return _cut(members, pairs, self._why(lost)) if pairs else self.root_cause_of(members, members[lost])

    def _cut_from(self, members: Mapping[int, Member], lost: int) -> Set[Pair]:
        """Return the pairs of ranks whose links are broken, if this rank is running; otherwise none."""
        about = [item for item in self._suspicions if item.peer == lost and item.kind in _ABOUT_LINKS]
        if not about or not members[lost].is_here:
            return set()
        here = {rank for rank, member in members.items() if member.is_here}
        if lost not in self._heartbeats:
            silent = any(item.kind in _SILENT_KINDS for item in about)
            if not silent or not any(_covers(heard, lost) for heard, _ in self._heartbeats.values()):
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
        """Return the collective of the lowest rank that lost this one in a collective; if there is none, of
        the lowest rank that lost another one.
        """
        busy = [item for item in self._suspicions if item.doing]
        return min(busy, key=lambda item: (item.peer != lost, item.reporter)).doing if busy else ""

    def root_cause_of(self, members: Mapping[int, Member], culprit: Member) -> RootCause:
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
        if reports and culprit.is_here:
            cause = f"{members[reports[0].reporter].name()} reports: {reports[0].why}"
        how = self.exit_of(culprit.number)
        if how is not None and how not in cause:
            cause = f"{cause}, {how}"
        cause = cause.rstrip(".")
        if culprit.left is not None and culprit.gone is None:
            text = f"has finished ({cause}){during}. Every rank must make the same calls before it ends; one"
            return RootCause("lost", f"{culprit.name()} {text} {_with_less_data(doing)}", culprit)
        if reports and culprit.gone is None and reports[0].kind == "late":
            return RootCause("stalled", f"{culprit.name()} is late{during}: {cause}.", culprit)
        if reports and culprit.gone is None and reports[0].kind not in ("lost", "closed"):
            return RootCause("stalled", f"{culprit.name()} is silent{during}: {cause}.", culprit)
        # A defect of the program is not a loss: another attempt would fail again.
        kind = "mismatch" if cause.startswith(f"uncaught {MismatchError.__name__}:") else "lost"
        return RootCause(kind, f"{culprit.name()} was lost{during}: {cause}.", culprit)


def _with_less_data(doing: str) -> str:
    """Return the advice for a rank with less data: calls without a name are PyTorch's, or need all ranks."""
    if "'" in doing:
        return "that has less data than others can call join()."
    return (
        "that has less data than others can train inside `with model.join():` (PyTorch's DDP), or use "
        "collectives by name and call join()."
    )


def silence(member: Member, silent_s: float, when: str) -> RootCause:
    """Return the root cause if a member does not answer pings; ``when`` is the activity meanwhile."""
    return RootCause(
        "stalled",
        f"{member.name()} has been silent for {silent_s:.0f} s while {when}: its process is stopped, swapped "
        "out or cut off, or a C call keeps the interpreter lock (RINGCOMM_DEAD_AFTER sets the limit).",
        member,
    )


def _cut(members: Mapping[int, Member], pairs: Set[Pair], why: str) -> RootCause:
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


def _names(members: Mapping[int, Member], ranks: List[int]) -> str:
    """Return the ranks as text, such as ``rank 1 (jetson1) and rank 2 (jetson2)``."""
    return " and ".join(members[rank].name() for rank in ranks)


def _covers(ranges: Ranges, rank: int) -> bool:
    return any(first <= rank <= last for first, last in ranges)


def _grouped(texts: Mapping[int, str]) -> List[str]:
    """Return lines from texts, by rank; ranks whose texts name the same call share a line.

    A difference stands once, in the line of the lowest rank that reports it. It is repeated for a peer that
    reports nothing itself, as no line names that peer's call.
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
