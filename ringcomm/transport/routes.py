"""Which of two hosts' addresses their ranks should use: decided from what was tried.

Pure: attempts go in, routes come out. An *attempt* is what one host's first rank saw when it
dialled one address of another host's first rank. Only attempts that proved to reach the right rank
of the right job count, and nobody dials an address that its own machine has too (172.17.0.1 of docker0,
on many): what listens there is on its own machine.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..errors import ProtocolError
from .nics import VIRTUAL

SPEED_TIE = 0.75
"""Routes at least this fast, compared to the fastest, count as equally fast."""


class Attempt(NamedTuple):
    """What became of dialling one address.

    Attributes:
        source, target: the ranks at both ends.
        address, port: what was dialled.
        local: the address this end got; empty if it did not connect.
        local_iface, remote_iface: interface names at both ends (they need not be equal).
        virtual: whether either interface is virtual.
        why: empty if the right rank answered; otherwise what happened instead.
        mb_per_s: measured speed, or None if there was no need to measure.
    """

    source: int
    target: int
    address: str
    port: int
    local: str
    local_iface: str
    remote_iface: str
    virtual: bool
    why: str
    mb_per_s: Optional[float] = None

    def to_json(self) -> Dict[str, Any]:
        """As it travels in a control message."""
        return dict(self._asdict())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attempt:
        """The inverse of :meth:`to_json`.

        Raises:
            ProtocolError: a field is missing or of the wrong type.
        """
        try:
            speed = data["mb_per_s"]
            ipaddress.ip_address(str(data["address"]))
            return cls(
                source=int(data["source"]),
                target=int(data["target"]),
                address=str(data["address"]),
                port=int(data["port"]),
                local=str(data["local"]),
                local_iface=str(data["local_iface"]),
                remote_iface=str(data["remote_iface"]),
                virtual=bool(data["virtual"]),
                why=str(data["why"]),
                mb_per_s=None if speed is None else float(speed),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as problem:
            raise ProtocolError(f"a report of dialled addresses is malformed: {problem!r}") from None


def not_dialled(source: int, target: int, offer: Mapping[str, Any]) -> Attempt:
    """What is reported of an address that the target has, and the source's machine as well."""
    return Attempt(
        source=source,
        target=target,
        address=str(offer["address"]),
        port=int(offer["port"]),
        local="",
        local_iface="?",
        remote_iface=str(offer.get("iface", "?")),
        virtual=is_virtual("", str(offer.get("kind", ""))),
        why="not dialled, because that host has this address itself",
    )


def worth_measuring(attempts: Sequence[Attempt]) -> List[Attempt]:
    """One successful attempt per wire, if there is more than one wire to choose from; else none.

    A wire is a pair of interfaces: its IPv4 and IPv6 addresses are equally fast.
    """
    good = [item for item in attempts if not item.why]
    candidates = [item for item in good if not item.virtual] or good
    best: Dict[Wire, Attempt] = {}
    for item in sorted(candidates, key=_address_order):
        best.setdefault(_wire(item), item)
    return list(best.values()) if len(best) > 1 else []


def choose_route(attempts: Sequence[Attempt]) -> Optional[Attempt]:
    """The best of the attempts between two hosts, in either direction, or None if none succeeded.

    Real interfaces come before virtual ones, then the fastest wire (within :data:`SPEED_TIE`), then
    routable addresses before link-local ones and IPv4 before IPv6; equal ones are taken in a fixed
    order, so that every start of the same job chooses alike.
    """
    good = [item for item in attempts if not item.why]
    if not good:
        return None
    speeds: Dict[Wire, float] = {}
    fastest: Dict[bool, float] = {}
    for item in good:
        speed = item.mb_per_s or 0.0
        speeds[_wire(item)] = max(speeds.get(_wire(item), 0.0), speed)
        fastest[item.virtual] = max(fastest.get(item.virtual, 0.0), speed)

    def order(item: Attempt) -> Tuple[bool, bool, Tuple[bool, bool, int, str]]:
        slow = speeds[_wire(item)] < SPEED_TIE * fastest[item.virtual]
        return (item.virtual, slow, _address_order(item))

    return min(good, key=order)


Wire = FrozenSet[Tuple[int, str]]


def _wire(item: Attempt) -> Wire:
    """The pair of interfaces, the same seen from either end."""
    return frozenset(((item.source, item.local_iface), (item.target, item.remote_iface)))


def _address_order(item: Attempt) -> Tuple[bool, bool, int, str]:
    address = ipaddress.ip_address(item.address)
    return (address.is_link_local, address.version == 6, item.source, item.address)


def is_virtual(local_kind: str, remote_kind: str) -> bool:
    """Whether a route between interfaces of these kinds counts as virtual."""
    return VIRTUAL in (local_kind, remote_kind)


def explain_no_route(names: Mapping[int, str], attempts: Sequence[Attempt]) -> str:
    """The list of everything that was tried, from where to where, and why each failed."""
    lines = []
    for item in attempts:
        origin = names.get(item.source, f"rank {item.source}")
        target = names.get(item.target, f"rank {item.target}")
        lines.append(f"  {origin} -> {target} at {item.address} ({item.remote_iface}): {item.why}")
    return "\n".join(lines) if lines else "  nothing could be tried: one of them offered no address"
