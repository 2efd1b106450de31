"""All samples of a job: the present rates of its ranks, and the history for the report. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .numbers import MAX_RANKS, Sample, parse_sample
from .waiting import (
    Matrix,
    Slowest,
    Waits,
    names_of,
    slowest_rank,
    totals_of,
    waiting_matrix,
    waits_between,
)

WINDOW_S = 10.0
"""Rates of the live view are averages over this time."""
MIN_S = 0.5
"""Shorter periods, such as the last one of a job, are too short for rates."""
MAX_POINTS = 480
"""A curve with more points is reduced to half of them."""


class RankRates(NamedTuple):
    """A rank's rates in a period, per second; `waited` is the share of the time in collectives."""

    period_s: float
    steps: float
    calls: float
    sent_bytes: float
    received_bytes: float
    waited: float


class Point(NamedTuple):
    """A point of the report's curves; `at_s` is the middle of the period, from the start of the job."""

    at_s: float
    rates: RankRates


def rates_between(before: Sample, after: Sample) -> Optional[RankRates]:
    """Return the rates between two samples of one rank; None if both have the same time, or another epoch."""
    period_s = after.elapsed_s - before.elapsed_s
    if period_s <= 0.0 or after.generation != before.generation:
        return None
    return RankRates(
        period_s,
        max(0, after.steps - before.steps) / period_s,
        max(0, after.calls - before.calls) / period_s,
        max(0, after.sent_bytes - before.sent_bytes) / period_s,
        max(0, after.received_bytes - before.received_bytes) / period_s,
        min(1.0, max(0.0, after.waited_s - before.waited_s) / period_s),
    )


class RankHistory:
    """The samples of one rank, or of one process of an elastic job. Times are of the launcher's clock."""

    def __init__(self, began_s: float) -> None:
        self.latest: Optional[Sample] = None  # the last sample
        self.points: List[Point] = []  # the curves
        # by rank, the highest rate of sending to it between two samples, in bytes/s
        self.peak_bytes: Dict[int, float] = {}
        self._began_s = began_s
        self._recent: Deque[Sample] = deque()
        self._point_from: Optional[Sample] = None
        self._interval_s = MIN_S

    def add(self, sample: Sample) -> None:
        last, self.latest = self.latest, sample
        if last is not None and last.generation != sample.generation:
            self._recent.clear()
            self._point_from = None
        elif last is not None:
            self._note_peaks(last, sample)
        self._recent.append(sample)
        while len(self._recent) > 2 and sample.at_s - self._recent[1].at_s >= WINDOW_S:
            self._recent.popleft()
        self._add_point(sample)

    def _note_peaks(self, before: Sample, after: Sample) -> None:
        period_s = after.elapsed_s - before.elapsed_s
        if period_s < MIN_S:
            return
        for rank, peer in after.peers.items():
            earlier = before.peers.get(rank)
            sent_bytes = peer.sent_bytes - (0 if earlier is None else earlier.sent_bytes)
            self.peak_bytes[rank] = max(self.peak_bytes.get(rank, 0.0), sent_bytes / period_s)

    def _add_point(self, sample: Sample) -> None:
        start = self._point_from
        if start is None:
            self._point_from = sample
            return
        if sample.at_s - start.at_s < self._interval_s:
            return
        rates = rates_between(start, sample)
        if rates is None:
            return
        self.points.append(Point((start.at_s + sample.at_s) / 2 - self._began_s, rates))
        self._point_from = sample
        if len(self.points) >= MAX_POINTS:
            self.points = [_mean(*pair) for pair in zip(self.points[::2], self.points[1::2])]
            self._interval_s = 2 * max(self._interval_s, 1.0)

    @property
    def window(self) -> Tuple[Optional[Sample], Optional[Sample]]:
        """The first and the last sample of the present window."""
        return (self._recent[0], self._recent[-1]) if len(self._recent) > 1 else (None, self.latest)

    @property
    def rates(self) -> Optional[RankRates]:
        """The rates in the present window."""
        first, last = self.window
        return None if first is None or last is None else rates_between(first, last)


def _mean(one: Point, other: Point) -> Point:
    """Merge two neighbouring points."""
    first_s, second_s = one.rates.period_s, other.rates.period_s
    total_s = first_s + second_s
    means = [(a * first_s + b * second_s) / total_s for a, b in zip(one.rates[1:], other.rates[1:])]
    return Point((one.at_s + other.at_s) / 2, RankRates(total_s, *means))


class History:
    """The samples of all ranks of a job. Times are of the launcher's clock."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.processes: Dict[int, RankHistory] = {}  # by process number: the rank except in elastic jobs
        # by (rank, peer), the rank's interface of their link
        self.interfaces: Dict[Tuple[int, int], str] = {}
        self._members: Optional[Sequence[int]] = None

    def changed(self, members: Sequence[int]) -> None:
        """Take the present processes of an elastic job, by rank."""
        self._members = members

    def take(self, process: int, data: bytes, now_s: float) -> bool:
        """Take the report of a process; return whether it is valid. A report of another rank than the process
        has is not valid.
        """
        sample = parse_sample(data, now_s, MAX_RANKS if self._members is None else len(self._members))
        if sample is None or self._members is None and sample.rank != process:
            return False
        self.processes.setdefault(process, RankHistory(self.began_s)).add(sample)
        return True

    def linked(self, links: Sequence[Mapping[str, Any]]) -> None:
        """Take the links of an epoch (:func:`ringcomm.rendezvous.routing.link_rows`); no rows: unknown."""
        if links:
            self.interfaces = {}
        for row in links:
            rank, peer = int(row["rank"]), int(row["peer"])
            by = f" (relayed over {row['relay']})" if row.get("relay") else ""
            self.interfaces[rank, peer] = f"{row['iface']}{by}"
            self.interfaces[peer, rank] = f"{row['peer_iface']}{by}"

    def interfaces_of(self, rank: int) -> List[str]:
        """Return the interfaces over which a rank reaches other hosts, sorted by name."""
        return sorted({name for (one, _), name in self.interfaces.items() if one == rank} - {"", "unix"})

    def present(self) -> Dict[int, int]:
        """Return the process number by rank, for processes that have reported as that rank."""
        members = self._members
        rows = {number: number for number in self.processes} if members is None else dict(enumerate(members))
        latest = {number: process.latest for number, process in self.processes.items()}
        return {
            rank: number for rank, number in sorted(rows.items())
            if (sample := latest.get(number)) is not None and sample.rank == rank
        }

    def local_steps(self) -> List[str]:
        """Return rank 0's report about its local steps: one text, or none."""
        number = self.present().get(0)
        sample = None if number is None else self.processes[number].latest
        return [sample.local_steps] if sample is not None and sample.local_steps else []

    def slowest_now(self, hosts: Mapping[int, str]) -> Optional[Slowest]:
        """Return the rank that the others wait for in the present window; `hosts` are by process."""
        waits: Dict[int, Waits] = {}
        periods_s = []
        for rank, number in self.present().items():
            first, last = self.processes[number].window
            if first is None or last is None:
                return None
            waits[rank] = waits_between(first, last)
            periods_s.append(last.elapsed_s - first.elapsed_s)
        return slowest_rank(waits, names_of(self.present(), hosts), max(periods_s, default=0.0))

    def matrix(self) -> Matrix:
        """Return the total time that each rank of the newest epoch has waited for each other one."""
        return waiting_matrix(totals_of(self._latest()))

    def slowest(self, hosts: Mapping[int, str]) -> Optional[Slowest]:
        """Return the rank that the others have waited for in the whole epoch; `hosts` are by process."""
        elapsed_s = max((sample.elapsed_s for sample in self._latest()), default=0.0)
        return slowest_rank(totals_of(self._latest()), names_of(self.present(), hosts), elapsed_s)

    def _latest(self) -> Sequence[Sample]:
        """Return the last sample of each process of the newest epoch."""
        found = [self.processes[number].latest for number in self.present().values()]
        return [sample for sample in found if sample is not None]

    def samples(self) -> Sequence[Tuple[int, Sample]]:
        """Return the last sample of each process, with its number, by rank; present ranks come first."""
        found = [(number, item.latest) for number, item in self.processes.items() if item.latest is not None]
        present = set(self.present().values())
        return sorted(found, key=lambda pair: (pair[0] not in present, pair[1].rank, pair[0]))
