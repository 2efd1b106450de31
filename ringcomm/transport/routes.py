"""Chooses the addresses between the ranks of two hosts. Pure.

An *attempt* is the result of one host's first rank dialling one address of another host's first rank. Only
attempts that proved to reach the right rank of the right job count, so an address that exists everywhere
(172.17.0.1 of docker0) cannot win; and no rank dials an address that its own machine has as well, unless the
other rank is on the same machine.

A *wire* is a pair of interfaces. Where several connect two hosts, all are measured at the same time, in both
directions, and the slower direction counts. Wired ones come before wireless ones before virtual ones, and the
first of equal ones wins. A measurement overrules that order only if the difference is large and a second one
agrees. Wires of the same kind also need two measurements: nothing else shows which of them is slow, and a
moment without a processor makes a fast one look slow.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..errors import ProtocolError
from .nics import PREFERENCE, WIRED, WIRELESS, worse_kind

SAME_KIND_RATIO = 1.6
"""A wire must be this many times as fast as one of its kind that comes before it in the fixed order."""
OTHER_KIND_RATIO = 4.0
"""A wire must be this many times as fast as one of a better kind."""
PLENTY_MB_PER_S = 625.0
"""Wires of 5 Gbit/s and more count as equal: there processors and their load decide."""
IMPLAUSIBLE_MB_PER_S = {WIRELESS: 300.0}
"""A wire of this kind counts as no faster: the other one may have been slow for lack of a processor."""
MAX_MEASUREMENTS = 3


class Attempt(NamedTuple):
    """The result of dialling one address."""

    source: int
    target: int
    address: str
    port: int
    local: str  # this end's address; empty if it did not connect
    local_iface: str  # interface names at the two ends need not be equal
    remote_iface: str
    kind: str  # of the route: the worse of both interfaces'
    why: str  # the failure; empty if the right rank answered
    mb_per_s: Optional[float] = None  # of the slower direction; None: not measured
    too_slow: bool = False  # a time limit ended it; another attempt may succeed

    def to_json(self) -> Dict[str, Any]:
        """Return the fields for a control message."""
        return dict(self._asdict())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attempt:
        """Invert :meth:`to_json`; raises ProtocolError if a field is missing or of the wrong type."""
        try:
            speed = data["mb_per_s"]
            if data["kind"] not in PREFERENCE:
                raise ValueError(f"no kind of route: {str(data['kind'])[:40]!r}")
            ipaddress.ip_address(str(data["address"]))
            return cls(
                source=int(data["source"]),
                target=int(data["target"]),
                address=str(data["address"]),
                port=int(data["port"]),
                local=str(data["local"]),
                local_iface=str(data["local_iface"]),
                remote_iface=str(data["remote_iface"]),
                kind=str(data["kind"]),
                why=str(data["why"]),
                mb_per_s=None if speed is None else float(speed),
                too_slow=bool(data["too_slow"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as problem:
            raise ProtocolError(f"a report of dialled addresses is malformed: {problem!r}") from None


def not_dialled(source: int, target: int, offer: Mapping[str, Any]) -> Attempt:
    """Return the report for an address that the target has, and the source's machine as well."""
    return Attempt(
        source=source,
        target=target,
        address=str(offer["address"]),
        port=int(offer["port"]),
        local="",
        local_iface="?",
        remote_iface=str(offer.get("iface", "?")),
        kind=worse_kind(WIRED, str(offer.get("kind", WIRED))),
        why="not dialled, because that host has this address itself",
    )


RELAYED = "relayed"
"""The kind of a route on which neither end dials the other."""


def relayed(source: int, target: int) -> Attempt:
    """Return the route between two ranks that a relay connects; the source begins the handshake."""
    return Attempt(source, target, "", 0, "", "", "", RELAYED, "")


Wire = FrozenSet[Tuple[int, str]]
"""Two ranks with an interface of each: the same from either end."""


def wire_of(item: Attempt) -> Wire:
    """Return the pair of interfaces that an attempt used."""
    return frozenset(((item.source, item.local_iface), (item.target, item.remote_iface)))


def candidates(attempts: Sequence[Attempt]) -> List[Attempt]:
    """Return the best successful attempt of every wire between two hosts, the preferred wire first. The IPv4
    and IPv6 addresses of a wire are equally fast: routable ones come before link-local ones, IPv4 before
    IPv6. Equal wires have a fixed order, so every start of a job chooses alike.
    """
    best: Dict[Wire, Attempt] = {}
    for item in sorted((item for item in attempts if not item.why), key=_order):
        best.setdefault(wire_of(item), item)
    return list(best.values())


def choose(wires: Sequence[Attempt], measured: Sequence[Mapping[Wire, float]]) -> Optional[int]:
    """Return the index of the :func:`candidate <candidates>` to use, or None to measure (once more).
    ``measured`` has the MB/s of every wire for each measurement so far; a missing wire broke in it.
    """
    if len(wires) == 1:
        return 0
    votes = [_fastest(wires, speeds) for speeds in measured]
    alike = any(item.kind == wires[0].kind for item in wires[1:])
    if votes == [0] and not alike:
        return 0
    for vote in votes:
        if votes.count(vote) > 1:
            return vote
    return min(votes) if len(votes) >= MAX_MEASUREMENTS else None


def _fastest(wires: Sequence[Attempt], speeds: Mapping[Wire, float]) -> int:
    """Return the wire to use if this measurement is right."""
    known = [
        min(speeds.get(wire_of(item), 0.0), IMPLAUSIBLE_MB_PER_S.get(item.kind, PLENTY_MB_PER_S))
        for item in wires
    ]
    best = 0
    for index, item in enumerate(wires):
        ratio = SAME_KIND_RATIO if item.kind == wires[best].kind else OTHER_KIND_RATIO
        if known[index] > 0.0 and known[index] >= ratio * known[best]:
            best = index
    return best


def _order(item: Attempt) -> Tuple[int, bool, bool, int, str]:
    address = ipaddress.ip_address(item.address)
    return (PREFERENCE[item.kind], address.is_link_local, address.version == 6, item.source, item.address)


def explain_no_route(names: Mapping[int, str], attempts: Sequence[Attempt]) -> str:
    """Return a list of all attempts, from where to where, and why each failed."""
    lines = []
    for item in attempts:
        origin = names.get(item.source, f"rank {item.source}")
        target = names.get(item.target, f"rank {item.target}")
        lines.append(f"  {origin} -> {target} at {item.address} ({item.remote_iface}): {item.why}")
    return "\n".join(lines) if lines else "  nothing could be tried: one of them offered no address"


def pairings(members: Sequence[int], most: Optional[int] = None) -> List[List[Tuple[int, int]]]:
    """Return rounds of disjoint pairs in which every two members meet once (a round-robin tournament), at
    most ``most``.

    >>> pairings([0, 2, 5])
    [[(2, 5)], [(0, 5)], [(0, 2)]]
    """
    circle = [*members] if len(members) % 2 == 0 else [*members, -1]
    rounds: List[List[Tuple[int, int]]] = []
    for _ in range(min(len(circle) - 1, len(circle) if most is None else most)):
        pairs = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]))
        rounds.append(sorted((min(pair), max(pair)) for pair in pairs if -1 not in pair))
        circle.insert(1, circle.pop())
    return rounds
