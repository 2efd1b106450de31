"""The counters that ranks report while they run: valid samples, rates and curves, and which rank the others
wait for. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.errors import ProtocolError

from ..reach.incoming import amount, decoded, fields, flag, items, row, table, whole

MAX_RANKS = _MAX_ENTRIES = 4096
_TEXT_CHARACTERS = 1000
WINDOW_S = 10.0  # rates of the live view are averages over this time
MIN_S = 0.5  # shorter periods, such as the last one of a job, are too short for rates
MAX_POINTS = 480  # a curve with more points loses every second one
MIN_SHARE = 0.1
"""A rank computes longest if the others wait for this part of the time more than it does."""
MIN_BUSY, SLOW_LINK = 0.3, 0.5
"""A link holds the job up if it is busy for at least this part of the time, and has at most this part of the
speed of links between other hosts."""
MIN_DELIVERED_BYTES = 1 << 20  # a link that has delivered less has no known speed


# -- samples ----------------------------------------------------------------------------------


class PeerNumbers(NamedTuple):
    """A rank's exchange with another one."""

    sent_bytes: int = 0  # headers included, as in received_bytes
    received_bytes: int = 0
    slept_s: float = 0.0  # asleep until the other one's data came
    delivered_bytes: int = 0  # by TCP to the other one, as the system counts it
    busy_s: float = 0.0  # TCP's time for that


class KindNumbers(NamedTuple):
    """The totals of a rank's collectives of one kind; `moved_bytes` are sent and received."""

    runs: int = 0
    took_s: float = 0.0
    moved_bytes: int = 0


class Sample(NamedTuple):
    """The counters of a rank at one time."""

    at_s: float  # arrival, by the launcher's clock
    rank: int  # as its report says
    generation: int  # membership epoch
    elapsed_s: float  # since the rank joined the job
    steps: int  # of training
    waited_s: float  # in collectives, moving data or waiting for other ranks
    peers: Dict[int, PeerNumbers]  # by rank
    kinds: Dict[str, KindNumbers]  # by kind, such as allreduce
    operations: Dict[str, KindNumbers]  # by description, those that took the most time
    late_s: Dict[int, float]  # from rank 0 only: by rank, how long operations by name waited for it alone
    doing: str  # the present or the last collective
    inside: bool  # it is in that collective
    waits_for: Tuple[int, ...]  # ranks from which it waits to receive

    @property
    def calls(self) -> int:
        return sum(kind.runs for kind in self.kinds.values())

    @property
    def sent_bytes(self) -> int:
        return sum(peer.sent_bytes for peer in self.peers.values())

    @property
    def received_bytes(self) -> int:
        return sum(peer.received_bytes for peer in self.peers.values())


def _named(value: Any) -> str:
    return str(value)[:_TEXT_CHARACTERS]


_KINDS = table(_named, row(whole(), amount, whole()), _MAX_ENTRIES)
_SAMPLE = fields({
    "rank": whole(), "generation": whole(), "elapsed_s": amount, "steps": whole(),
    "waited_s": amount, "kinds": _KINDS, "operations": _KINDS, "late": table(int, amount, _MAX_ENTRIES),
    "peers": table(int, row(whole(), whole(), amount, whole(), amount), _MAX_ENTRIES),
    "doing": _named, "inside": flag, "waits_for": items(whole(), _MAX_ENTRIES),
})  # fmt: skip


def parse_sample(data: bytes, at_s: float, size: int = MAX_RANKS) -> Optional[Sample]:
    """Return a rank's report from JSON; None if it is not valid."""
    try:
        found = decoded(data, _SAMPLE)
    except ProtocolError:
        return None
    peers = {rank: PeerNumbers(*values) for rank, values in found["peers"].items() if 0 <= rank < size}
    kinds, operations = (
        {name: KindNumbers(*values) for name, values in found[part].items()}
        for part in ("kinds", "operations")
    )
    late_s = {rank: seconds for rank, seconds in found.pop("late").items() if 0 <= rank < size}
    waits_for = tuple(rank for rank in found["waits_for"] if rank < size)
    changed = {"peers": peers, "kinds": kinds, "operations": operations, "waits_for": waits_for}
    return Sample(**{**found, **changed, "at_s": at_s, "late_s": late_s})


# -- waiting times ----------------------------------------------------------------------------

Matrix = Dict[Tuple[int, int], float]
"""By (rank that waits, rank that it waits for), seconds."""


class Waits(NamedTuple):
    """A rank's waiting times in a period."""

    waited_s: float  # in collectives, moving data or waiting for other ranks
    links: Mapping[int, Tuple[int, float]]  # by rank, bytes that TCP delivered to it, seconds for that


def waits_between(before: Optional[Sample], after: Sample) -> Waits:
    """Return a rank's waiting times between two samples; without the first one, from the start."""
    links = {}
    for rank, peer in after.peers.items():
        earlier = PeerNumbers() if before is None else before.peers.get(rank, PeerNumbers())
        delivered_bytes = max(0, peer.delivered_bytes - earlier.delivered_bytes)
        links[rank] = delivered_bytes, max(0.0, peer.busy_s - earlier.busy_s)
    return Waits(max(0.0, after.waited_s - (0.0 if before is None else before.waited_s)), links)


def waiting_matrix(samples: Sequence[Sample]) -> Matrix:
    """Return the time that each rank has waited for each other one.

    A rank reports from which rank the data of a running collective were missing. An operation by name runs
    only when all ranks have submitted it, and only rank 0 is told which ranks are late. So the rest of a
    rank's waiting is divided among the late ranks in proportion to their lateness, and is at most that.
    """
    late_s = next((sample.late_s for sample in samples if sample.late_s), {})
    matrix: Matrix = {}
    for sample in samples:
        slept_s = {rank: peer.slept_s for rank, peer in sample.peers.items()}
        total_s = sum(seconds for rank, seconds in late_s.items() if rank != sample.rank)
        rest_s = max(0.0, sample.waited_s - sum(slept_s.values()))
        part = min(1.0, rest_s / total_s) if total_s else 0.0
        for other in (each.rank for each in samples if each.rank != sample.rank):
            matrix[sample.rank, other] = slept_s.get(other, 0.0) + part * late_s.get(other, 0.0)
    return matrix


class Slowest(NamedTuple):
    """The rank that the others wait for."""

    rank: int
    share: float  # of the time that the others wait for it, or that its link is busy
    link_mb_per_s: float = 0.0  # if its link is the reason
    other_mb_per_s: float = 0.0  # the lowest of the links between other hosts


def slowest_rank(
    waits: Mapping[int, Waits], hosts: Mapping[int, str], period_s: float
) -> Optional[Slowest]:
    """Return the rank that the others wait for; None if ranks wait equally and their links are alike.

    The rank that computes longest waits least. Where all wait equally, they wait for the network; then it is
    the rank behind links that are slow and busy, while links between other hosts are fast. A slow link
    between two hosts without a third one is attributed to neither.
    """
    if len(waits) < 2 or period_s <= 0.0:
        return None
    rank = min(sorted(waits), key=lambda item: waits[item].waited_s)
    others = [item.waited_s for other, item in waits.items() if other != rank]
    share = (sum(others) / len(others) - waits[rank].waited_s) / period_s
    if share >= MIN_SHARE:
        return Slowest(rank, min(1.0, share))
    return _behind_slow_link(waits, hosts, period_s)


def _behind_slow_link(
    waits: Mapping[int, Waits], hosts: Mapping[int, str], period_s: float
) -> Optional[Slowest]:
    fastest: Dict[str, Tuple[float, float]] = {}  # the speed of a host's best link, and its busy share
    for rank, item in waits.items():
        for other, (delivered_bytes, busy_s) in item.links.items():
            if delivered_bytes >= MIN_DELIVERED_BYTES and busy_s > 0.0 and other in waits:
                link = (delivered_bytes / busy_s / 1e6, busy_s / period_s)
                for host in (hosts.get(rank, ""), hosts.get(other, "")):
                    fastest[host] = max(fastest.get(host, link), link)
    if len(fastest) < 3:
        return None
    (own, busy), (others, _), *_ = sorted(fastest.values())
    if own > SLOW_LINK * others or busy < MIN_BUSY:
        return None
    rank = min(rank for rank in waits if fastest.get(hosts.get(rank, "")) == (own, busy))
    return Slowest(rank, min(1.0, busy), own, others)


# -- over time --------------------------------------------------------------------------------


class RankRates(NamedTuple):
    """A rank's rates in a period, per second; `waited` is the share of the time in collectives."""

    steps: float
    calls: float
    sent_bytes: float
    waited: float


def rates_between(before: Sample, after: Sample) -> Optional[RankRates]:
    """Return the rates between two samples of one rank; None if both have the same time, or another epoch."""
    period_s = after.elapsed_s - before.elapsed_s
    if period_s <= 0.0 or after.generation != before.generation:
        return None
    return RankRates(
        max(0, after.steps - before.steps) / period_s,
        max(0, after.calls - before.calls) / period_s,
        max(0, after.sent_bytes - before.sent_bytes) / period_s,
        min(1.0, max(0.0, after.waited_s - before.waited_s) / period_s),
    )


class RankHistory:
    """The samples of one rank, or of one process of an elastic job. Times are of the launcher's clock."""

    def __init__(self, began_s: float, first: Sample) -> None:
        self.latest = self._point_from = first
        self.points: List[Tuple[float, RankRates]] = []  # the curves: the middle of a period, rates
        self._began_s = began_s
        self._recent: Deque[Sample] = deque([first])
        self._interval_s = MIN_S

    def add(self, sample: Sample) -> None:
        if self.latest.generation != sample.generation:
            self._recent.clear()
            self._point_from = sample
        self.latest = sample
        self._recent.append(sample)
        while len(self._recent) > 2 and sample.at_s - self._recent[1].at_s >= WINDOW_S:
            self._recent.popleft()
        start = self._point_from
        rates = rates_between(start, sample)
        if sample.at_s - start.at_s < self._interval_s or rates is None:
            return
        self.points.append(((start.at_s + sample.at_s) / 2 - self._began_s, rates))
        self._point_from = sample
        if len(self.points) >= MAX_POINTS:
            del self.points[::2]
            self._interval_s = 2 * max(self._interval_s, 1.0)

    @property
    def window_start(self) -> Optional[Sample]:
        """The first sample of the present window; None if it has only one."""
        return self._recent[0] if len(self._recent) > 1 else None

    @property
    def rates(self) -> Optional[RankRates]:
        """The rates in the present window."""
        first = self.window_start
        return None if first is None else rates_between(first, self.latest)


class History:
    """The samples of all ranks of a job. Times are of the launcher's clock."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.processes: Dict[int, RankHistory] = {}  # by process number: the rank except in elastic jobs
        self.interfaces: Dict[Tuple[int, int], str] = {}  # the rank's of its link, by (rank, peer)
        self._members: Optional[Sequence[int]] = None

    def changed(self, members: Sequence[int]) -> None:
        """Take the present processes of an elastic job, by rank."""
        self._members = members

    def take(self, process: int, data: bytes, now_s: float) -> bool:
        """Take the report of a process; return whether it is valid."""
        sample = parse_sample(data, now_s, MAX_RANKS if self._members is None else len(self._members))
        if sample is None or self._members is None and sample.rank != process:
            return False
        if process in self.processes:
            self.processes[process].add(sample)
        else:
            self.processes[process] = RankHistory(self.began_s, sample)
        return True

    def linked(self, links: Sequence[Mapping[str, Any]]) -> None:
        """Take the links of an epoch (:func:`ringcomm.rendezvous.routing.link_rows`); no rows: unknown."""
        if links:
            self.interfaces = {}
        for link in links:
            rank, peer = int(link["rank"]), int(link["peer"])
            by = f" (relayed over {link['relay']})" if link.get("relay") else ""
            self.interfaces[rank, peer] = f"{link['iface']}{by}"
            self.interfaces[peer, rank] = f"{link['peer_iface']}{by}"

    def interfaces_of(self, rank: int) -> List[str]:
        """Return the interfaces over which a rank reaches other hosts, sorted by name."""
        return sorted({name for (one, _), name in self.interfaces.items() if one == rank} - {"", "unix"})

    def present(self) -> Dict[int, int]:
        """Return the process number by rank, for processes that have reported as that rank."""
        members = self._members
        rows = {number: number for number in self.processes} if members is None else dict(enumerate(members))
        return {
            rank: number for rank, number in sorted(rows.items())
            if number in self.processes and self.processes[number].latest.rank == rank
        }  # fmt: skip

    def slowest(self, hosts: Mapping[int, str], now: bool = False) -> Optional[Slowest]:
        """Return the rank that the others wait for in the present window, or have waited for in the epoch."""
        waits: Dict[int, Waits] = {}
        names, period_s = {}, 0.0
        for rank, number in self.present().items():
            process = self.processes[number]
            before = process.window_start if now else None
            if now and before is None:
                return None
            waits[rank] = waits_between(before, process.latest)
            names[rank] = hosts.get(number, "?")
            began_s = 0.0 if before is None else before.elapsed_s
            period_s = max(period_s, process.latest.elapsed_s - began_s)
        return slowest_rank(waits, names, period_s)

    def matrix(self) -> Matrix:
        """Return the total time that each rank of the newest epoch has waited for each other one."""
        return waiting_matrix([self.processes[number].latest for number in self.present().values()])

    def samples(self) -> Sequence[Tuple[int, Sample]]:
        """Return the last sample of each process, with its number, by rank; present ranks come first."""
        present = set(self.present().values())
        found = ((number, item.latest) for number, item in self.processes.items())
        return sorted(found, key=lambda pair: (pair[0] not in present, pair[1].rank, pair[0]))
