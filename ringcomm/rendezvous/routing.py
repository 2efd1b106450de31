"""Which way each rank is to reach each other one, from what the first ranks of the hosts have found."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ..transport.nics import LOCAL, LOOPBACK
from ..transport.routes import Attempt, choose_route, explain_no_route
from .membership import Member

_NEAREST = {LOCAL: 0, LOOPBACK: 1}

Routes = Dict[Tuple[int, int], Attempt]
"""By the indices of two hosts, the lower one first."""


class NoRoute(Exception):
    """Two hosts cannot reach each other; the text says what was tried."""


def choose_routes(leaders: Sequence[Member], reports: Mapping[int, Sequence[Attempt]]) -> Routes:
    """One route for each pair of hosts.

    Args:
        leaders: the first rank of every host.
        reports: by rank, what it has tried.

    Raises:
        NoRoute: there is none between two of them.
    """
    routes: Routes = {}
    for index, low in enumerate(leaders):
        for high in leaders[index + 1 :]:
            there = [item for item in reports.get(low.rank, ()) if item.target == high.rank]
            back = [item for item in reports.get(high.rank, ()) if item.target == low.rank]
            route = choose_route(there + back)
            if route is None:
                raise NoRoute(_no_route(low, high, there + back))
            routes[low.host_index, high.host_index] = route
    return routes


def routes_of(member: Member, members: Sequence[Member], routes: Routes) -> List[Dict[str, Any]]:
    """For every peer: whether to dial it, at which addresses in this order, and by which interface."""
    leaders = {item.rank: item for item in members}
    result = []
    for peer in members:
        if peer is member:
            continue
        if peer.host_index == member.host_index:
            # A Unix socket first, then the loopback; the rest in case two containers pass for one host.
            addresses = sorted(peer.addresses, key=lambda item: _NEAREST.get(str(item.get("kind")), 2))
            dial, iface = member.rank > peer.rank, ""
        else:
            pair = min(member.host_index, peer.host_index), max(member.host_index, peer.host_index)
            route = routes[pair]
            addresses = [item for item in peer.addresses if item.get("address") == route.address]
            dial = leaders[route.source].host_index == member.host_index
            iface = route.local_iface
        result.append({"peer": peer.rank, "dial": dial, "addresses": addresses, "iface": iface})
    return result


def _no_route(low: Member, high: Member, attempts: Sequence[Attempt]) -> str:
    names = {low.rank: low.host, high.rank: high.host}
    return (
        f"{low.host} and {high.host} cannot reach each other. Tried:\n{explain_no_route(names, attempts)}\n"
        "Check that both are on one network and that no firewall blocks TCP between them; --iface chooses "
        "interfaces."
    )
