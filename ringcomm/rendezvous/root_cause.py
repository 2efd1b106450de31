"""Whose fault it is: from reports that contradict and follow each other to one verdict.

When a rank dies, its neighbours see their connections break, give up, and break their own; the
first report to arrive need not be about the first who failed. So reports are collected for a
moment, and whoever is lost *without having lost somebody itself* is named.

Who is named must not be alive, though. So the rendezvous also asks everybody whom they hear and whom they
do not. If the one that others lost answers, or somebody still hears it, then a link is at fault, and the
verdict names what it connects.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from ..config import Slot
from ..errors import MismatchError, interruption_text
from .membership import Member

EVIDENCE_S = 1.0
"""How long to wait for the cause when all that is known is that a connection broke."""
SETTLE_S = 0.3
"""How long to wait for other reports that may name an earlier cause."""
_ROUNDING_S = 1e-3

NOBODY = -1
VANISHED = "it vanished without a word"


class Suspicion(NamedTuple):
    """A report that somebody is lost.

    Attributes:
        reporter: the rank that lost it, or ``NOBODY`` for the rendezvous itself.
        peer: who is lost.
        doing: the collective that the reporter was in; empty if in none.
        why: what the reporter saw.
        kind: ``vanished``: its control connection ended; ``interrupted``: it has said itself that it left a
            collective half-way (then ``doing`` is its own); ``closed``: a link to it ended while nobody
            needed it; ``unlinked``: it was never reached; otherwise as in
            :meth:`~ringcomm.rendezvous.control.ControlChannel.report_lost`.
        due_s: when to judge.
    """

    reporter: int
    peer: int
    doing: str
    why: str
    kind: str
    due_s: float


class Verdict(NamedTuple):
    """What every rank is told.

    Attributes:
        kind: ``lost``, ``stalled``, ``mismatch`` or ``cut``.
        text: one paragraph.
        culprit: whose fault it is, if that can be told.
        apart: for ``cut``: who do not hear each other.
    """

    kind: str
    text: str
    culprit: Optional[Member]
    apart: Tuple[Member, ...] = ()


_NOT_HEARD = ("silent", "still", "cut off")
_ABOUT_LINKS = ("lost", "closed", *_NOT_HEARD)
_FACTS = ("vanished", "interrupted")
Pair = FrozenSet[int]


class Blame:
    """Collects what is known about failures of one generation."""

    def __init__(self) -> None:
        self._suspicions: List[Suspicion] = []
        self._mismatches: Dict[int, str] = {}
        self._mismatch_due_s = 0.0
        self._exits: Dict[Slot, Tuple[str, bool]] = {}
        self._hears: Dict[int, Tuple[Set[int], Set[int]]] = {}

    def forget_reports(self) -> None:
        """A new generation starts. How processes ended stays known."""
        self._suspicions.clear()
        self._mismatches.clear()
        self._hears.clear()

    def answered(self, rank: int, heard: Iterable[int], silent: Iterable[int]) -> None:
        """A rank says whom it has heard lately and whom not. It is asked after every report."""
        self._hears[rank] = (set(heard), set(silent))

    def exited(self, slot: Slot, how: str, ok: bool) -> None:
        """The launcher says how a process ended."""
        self._exits[slot] = (how, ok)

    def exit_of(self, slot: Optional[Slot]) -> Optional[str]:
        """How the process in this place ended, if it has."""
        known = self._exits.get(slot) if slot is not None else None
        return known[0] if known is not None else None

    def suspect(self, suspicion: Suspicion) -> None:
        """Somebody reports a loss."""
        if not self._suspicions:
            self._hears.clear()  # Who lived before that may not live now.
        self._suspicions.append(suspicion)

    def mismatch(self, rank: int, text: str, now_s: float) -> None:
        """Somebody reports that another rank makes a different call."""
        if not self._mismatches:
            self._mismatch_due_s = now_s + SETTLE_S
        self._mismatches[rank] = text

    def due(self, members: Mapping[int, Member], now_s: float) -> Optional[Verdict]:
        """The verdict, once there has been enough time for better evidence; members by rank."""
        if self._mismatches and now_s >= self._mismatch_due_s - _ROUNDING_S:
            lines = ["The ranks do not make the same call.", *_grouped(self._mismatches)]
            return Verdict("mismatch", "\n".join(lines), None)
        # Who has left in peace may hang up as it likes.
        self._suspicions = [
            item for item in self._suspicions if item.kind != "closed" or members[item.peer].left is None
        ]
        due = [item for item in self._suspicions if now_s >= item.due_s - _ROUNDING_S]
        if due:
            # What others report, among them the vanished, is hearsay.
            facts = [item for item in self._suspicions if item.kind in _FACTS]
            return self._judge(members, (facts or due)[0].peer)
        return None

    def _judge(self, members: Mapping[int, Member], accused: int) -> Verdict:
        seen: Set[int] = set()
        while accused not in seen:
            seen.add(accused)
            earlier = next(
                (item for item in self._suspicions if item.reporter == accused and item.peer not in seen),
                None,
            )
            if earlier is None or members[accused].gone == VANISHED:
                break
            accused = earlier.peer
        alive = members[accused].gone is None and members[accused].left is None
        unlinked = [item for item in self._suspicions if item.peer == accused and item.kind == "unlinked"]
        if unlinked and alive:
            name = members[unlinked[0].reporter].name()
            return Verdict("no_route", f"{name} could not link up: {unlinked[0].why}.", None)
        pairs = set() if self._interruption(accused) else self._cut_from(members, accused)
        return _cut(members, pairs, self._why(accused)) if pairs else self.sentence(members, members[accused])

    def _cut_from(self, members: Mapping[int, Member], accused: int) -> Set[Pair]:
        """If this rank lives: between whom the links are broken. Otherwise nothing."""
        about = [item for item in self._suspicions if item.peer == accused and item.kind in _ABOUT_LINKS]
        if not about or members[accused].gone is not None or members[accused].left is not None:
            return set()
        here = {rank for rank, member in members.items() if member.gone is None and member.left is None}
        if accused not in self._hears:
            silent = any(item.kind in _NOT_HEARD for item in about)
            if not silent or not any(accused in self._hears[rank][0] for rank in self._hears):
                return set()
        pairs = {
            frozenset((item.reporter, item.peer))
            for item in self._suspicions
            if item.kind in _ABOUT_LINKS and item.reporter != NOBODY
        }
        pairs |= {frozenset((rank, peer)) for rank, (_, silent) in self._hears.items() for peer in silent}
        return {pair for pair in pairs if pair <= here}

    def _interruption(self, accused: int) -> Optional[Suspicion]:
        """What a rank has said itself of a collective that it left half-way."""
        own = (item for item in self._suspicions if item.peer == accused and item.kind == "interrupted")
        return next(own, None)

    def _why(self, accused: int) -> str:
        reasons = (item.why for item in self._suspicions if item.peer == accused and item.why)
        return next(reasons, "").rstrip(".")

    def _doing(self, accused: int) -> str:
        """What others were in when they lost this rank; where that differs, the lowest of them.

        If nobody has lost it in a collective, what those were in who lost somebody because of that.
        """
        busy = [item for item in self._suspicions if item.doing]
        return min(busy, key=lambda item: (item.peer != accused, item.reporter)).doing if busy else ""

    def sentence(self, members: Mapping[int, Member], culprit: Member) -> Verdict:
        """The verdict that names this member."""
        interruption = self._interruption(culprit.rank)
        if interruption is not None and culprit.gone is None:
            text = interruption_text(culprit.name(), interruption.why, interruption.doing)
            since = "" if culprit.left is None else f" Since then it has left the job ({culprit.left})."
            return Verdict("lost", text + since, culprit)
        doing = self._doing(culprit.rank)
        during = f" while others were in {doing}" if doing else ""
        reports = [item for item in self._suspicions if item.peer == culprit.rank and item.reporter != NOBODY]
        cause = culprit.gone or culprit.left or VANISHED
        if reports and culprit.gone is None and culprit.left is None:
            cause = f"{members[reports[0].reporter].name()} reports: {reports[0].why}"
        how = self.exit_of(culprit.slot)
        if how is not None and how not in cause:
            cause = f"{cause}, {how}"
        cause = cause.rstrip(".")
        if culprit.left is not None and culprit.gone is None:
            text = (
                f"has finished ({cause}){during}. Every rank must make the same calls before it ends; one "
                "that has less data than others can call join()."
            )
            return Verdict("lost", f"{culprit.name()} {text}", culprit)
        if reports and culprit.gone is None and reports[0].kind == "late":
            return Verdict("stalled", f"{culprit.name()} is late{during}: {cause}.", culprit)
        if reports and culprit.gone is None and reports[0].kind not in ("lost", "closed"):
            return Verdict("stalled", f"{culprit.name()} is silent{during}: {cause}.", culprit)
        # What is wrong with the program is not a loss that another attempt would mend.
        kind = "mismatch" if cause.startswith(f"uncaught {MismatchError.__name__}:") else "lost"
        return Verdict(kind, f"{culprit.name()} was lost{during}: {cause}.", culprit)


def _cut(members: Mapping[int, Member], pairs: Set[Pair], why: str) -> Verdict:
    """The verdict if ranks that live do not hear each other."""
    apart = sorted({rank for pair in pairs for rank in pair})
    hosts = {members[rank].host for rank in apart}
    between = [{members[rank].host for rank in pair} for pair in pairs]
    alone = [host for host in hosts if all(host in pair for pair in between)]
    if len(hosts) > 2 and len(alone) == 1:
        ranks = [rank for rank in apart if members[rank].host == alone[0]]
        others = _names(members, [rank for rank in apart if rank not in ranks])
        verb = "is" if len(ranks) == 1 else "are"
        who = f"{_names(members, ranks)} {verb} cut off from {others}"
        text = f"{who}, although not from the rendezvous: {why}."
        return Verdict("stalled", text, members[ranks[0]])
    where = (
        f"Something between {' and '.join(sorted(hosts))} is broken or blocks TCP: a cable, a switch, "
        "a firewall."
        if len(hosts) > 1
        else f"All of them are on {min(hosts)}, so that host has much more to do than it can, or was "
        "suspended for a while; --dead-after says for how long that is all right."
    )
    return Verdict(
        "cut",
        f"{_names(members, apart)} live, but do not hear each other: {why}. {where}",
        None,
        tuple(members[rank] for rank in apart),
    )


def _names(members: Mapping[int, Member], ranks: List[int]) -> str:
    """Like ``rank 1 (jetson1) and rank 2 (jetson2)``."""
    return " and ".join(members[rank].name() for rank in ranks)


def _grouped(texts: Mapping[int, str]) -> List[str]:
    """Texts that start with ``rank N: ``, by rank; those that are the same after that become one line."""
    ranks: Dict[str, List[int]] = {}
    for rank in sorted(texts):
        ranks.setdefault(texts[rank].replace(f"rank {rank}: ", "", 1), []).append(rank)
    return [
        texts[group[0]] if len(group) == 1 else f"ranks {', '.join(map(str, group))}: {text}"
        for text, group in ranks.items()
    ]
