"""Which rank the others wait for, and why, from the ranks' reported waiting times. Pure."""

from __future__ import annotations

from typing import Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from .numbers import PeerNumbers, Sample

MIN_SHARE = 0.1
"""A rank computes longest if the others wait for this part of the time more than it does."""
MIN_BUSY = 0.3
"""A link holds the job up if it is busy for at least this part of the time,"""
SLOW_LINK = 0.5
"""and has at most this part of the speed of links between other hosts."""
MIN_DELIVERED_BYTES = 1 << 20
"""A link that has delivered less has no known speed."""

Matrix = Dict[Tuple[int, int], float]
"""By (rank that waits, rank that it waits for), seconds."""


class Waits(NamedTuple):
    """A rank's waiting times in a period."""

    waited_s: float  # in collectives, moving data or waiting for other ranks
    slept_s: Mapping[int, float]  # by rank, until its data came
    late_s: Mapping[int, float]  # from rank 0 only: by rank, how long operations by name waited for it alone
    # by rank, bytes that TCP delivered to it, and the seconds for that
    links: Mapping[int, Tuple[int, float]]


def waits_between(before: Optional[Sample], after: Sample) -> Waits:
    """Return a rank's waiting times between two samples; without the first one, from the start."""
    peers = {} if before is None else before.peers
    late_before_s = {} if before is None else before.late_s
    slept_s, links = {}, {}
    for rank, peer in after.peers.items():
        earlier = peers.get(rank, PeerNumbers())
        slept_s[rank] = max(0.0, peer.slept_s - earlier.slept_s)
        links[rank] = (
            max(0, peer.delivered_bytes - earlier.delivered_bytes), max(0.0, peer.busy_s - earlier.busy_s)
        )  # fmt: skip
    late_s = {
        rank: max(0.0, seconds - late_before_s.get(rank, 0.0)) for rank, seconds in after.late_s.items()
    }
    waited_s = after.waited_s - (0.0 if before is None else before.waited_s)
    return Waits(max(0.0, waited_s), slept_s, late_s, links)


def waiting_matrix(waits: Mapping[int, Waits]) -> Matrix:
    """Return the time that each rank has waited for each other one.

    A rank reports from which rank the data of a running collective were missing. An operation by name runs
    only when all ranks have submitted it, and only rank 0 is told which ranks are late. So the rest of a
    rank's waiting is divided among the late ranks in proportion to their lateness, and is at most that.
    """
    late_s: Dict[int, float] = {}
    for item in waits.values():
        for rank, seconds in item.late_s.items():
            late_s[rank] = late_s.get(rank, 0.0) + seconds
    matrix: Matrix = {}
    for rank, item in waits.items():
        others = {other: seconds for other, seconds in late_s.items() if other != rank}
        rest_s = max(0.0, item.waited_s - sum(item.slept_s.values()))
        total_s = sum(others.values())
        part = min(1.0, rest_s / total_s) if total_s else 0.0
        for other in waits:
            if other != rank:
                matrix[rank, other] = item.slept_s.get(other, 0.0) + part * others.get(other, 0.0)
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


class _HostLink(NamedTuple):
    byte_per_s: float
    busy: float


def _behind_slow_link(
    waits: Mapping[int, Waits], hosts: Mapping[int, str], period_s: float
) -> Optional[Slowest]:
    fastest: Dict[str, _HostLink] = {}
    for rank, item in waits.items():
        for other, (delivered_bytes, busy_s) in item.links.items():
            if delivered_bytes >= MIN_DELIVERED_BYTES and busy_s > 0.0 and other in waits:
                link = _HostLink(delivered_bytes / busy_s, busy_s / period_s)
                for host in (hosts.get(rank, ""), hosts.get(other, "")):
                    fastest[host] = max(fastest.get(host, link), link)
    if len(fastest) < 3:
        return None
    slow, second, *_ = sorted(fastest, key=lambda host: fastest[host].byte_per_s)
    own, others = fastest[slow], fastest[second]
    if own.byte_per_s > SLOW_LINK * others.byte_per_s or own.busy < MIN_BUSY:
        return None
    rank = min(rank for rank in waits if hosts.get(rank, "") == slow)
    return Slowest(rank, min(1.0, own.busy), own.byte_per_s / 1e6, others.byte_per_s / 1e6)


def names_of(present: Mapping[int, int], hosts: Mapping[int, str]) -> Dict[int, str]:
    """Return the host name by rank, from the process number by rank and the host name by process."""
    return {rank: hosts.get(number, "?") for rank, number in present.items()}


def totals_of(samples: Sequence[Sample]) -> Dict[int, Waits]:
    """Return the waiting times from the start, by rank."""
    return {sample.rank: waits_between(None, sample) for sample in samples}
