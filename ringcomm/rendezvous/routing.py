"""How the members of one generation connect: probes, measurements, routes, links, and their table. Pure.

The first ranks of the hosts probe which addresses lead where, and measure where several networks connect two
hosts (:class:`Linking`). From that :class:`Routing` chooses one route for each pair of hosts. Then every rank
builds its links.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from ..errors import ProtocolError
from ..transport.nics import LOCAL, LOOPBACK
from ..transport.routes import RELAYED, Attempt, Wire, candidates, choose, explain_no_route, relayed, wire_of
from ..wire.messages import Message
from .membership import Action, Located, Member, Send, as_target

_NEAREST = {LOCAL: 0, LOOPBACK: 1}

Routes = Dict[Tuple[int, int], Attempt]
"""By the indices of two hosts, the lower one first."""

Pair = Tuple[int, int]
"""The first ranks of two hosts, the lower one first."""

HostWire = FrozenSet[Tuple[str, str, str]]
"""The name of a wire in later generations: of both ends the host, its machine and the interface."""

Known = Dict[FrozenSet[HostWire], List[Dict[HostWire, float]]]
"""By all wires between two hosts, the speed of each in MB/s, for every measurement."""

MAX_WIRES = 6
"""Maximum number of wires measured between two hosts, the preferred ones."""
MAX_TURNS = 12
"""With more hosts than that, those that measure do not wait for each other."""


RelayHost = Tuple[str, int]
"""The name of the host that relays between hosts without a route, and for how many pairs of ranks at most."""
NO_RELAY: RelayHost = ("", 0)


class NoRoute(Exception):
    """Two hosts cannot reach each other; the text lists the addresses tried and why each failed."""

    def __init__(self, text: str, ranks: Pair) -> None:
        super().__init__(text)
        self.ranks = ranks  # the first ranks of the two hosts


class Routing:
    """Derives one route for each pair of hosts from the attempts of their first ranks (``leaders``).

    Where several wires connect two hosts, one of them measures: :meth:`wanted` returns the measurements that
    each rank must make, and after all results (:meth:`measured`) the next ones. A pair of hosts with the same
    wires as in an earlier generation (``known``) does not measure again, which takes up to a second and more
    while all other ranks wait. Hosts that cannot reach each other are ``relayed``, if that is possible.
    """

    def __init__(
        self,
        leaders: Sequence[Located],
        reports: Mapping[int, Sequence[Attempt]],
        known: Optional[Known] = None,
        relayed: bool = False,
    ) -> None:
        self._relayed = relayed
        self._leaders = {leader.rank: leader for leader in leaders}
        self._crowd = len(self._leaders) > MAX_TURNS
        pairs = itertools.combinations(self._leaders, 2)
        self._tried: Dict[Pair, List[Attempt]] = {pair: [] for pair in pairs}
        for source, attempts in sorted(reports.items()):
            for item in attempts:
                found = self._tried.get((min(source, item.target), max(source, item.target)))
                if found is not None:
                    found.append(item)
        self._wires = {pair: candidates(tried)[:MAX_WIRES] for pair, tried in self._tried.items()}
        self._measured = {pair: self._again(wires, known or {}) for pair, wires in self._wires.items()}

    def unreached(self) -> List[Pair]:
        """Return the pairs of hosts of which neither end has reached the other."""
        return [pair for pair, wires in self._wires.items() if not wires]

    def leave_out(self, pairs: Sequence[Pair]) -> None:
        """Choose no routes for these pairs."""
        for pair in pairs:
            self._wires.pop(pair)

    def tried(self, pair: Pair) -> List[Attempt]:
        """Return all attempts between two hosts."""
        return self._tried[pair]

    def wanted(self) -> Dict[int, List[Dict[str, Any]]]:
        """Return the measurements that each rank must make now; empty once all routes are known. Pairs of
        hosts measure at the same time if they have no host in common, so that none disturbs another; with
        many hosts all at once, because taking turns would take too long.
        """
        orders: Dict[int, List[Dict[str, Any]]] = {}
        busy: Set[int] = set()
        for pair, wires in sorted(self._wires.items()):
            if not wires or choose(wires, self._measured[pair]) is not None:
                continue
            if busy & set(pair) and not self._crowd:
                continue
            busy |= set(pair)
            self._measured[pair].append({})
            for source in pair:
                own = [item for item in wires if item.source == source]
                target = pair[1] if source == pair[0] else pair[0]
                if own:
                    offers = [
                        {"address": x.address, "port": x.port, "iface": x.local_iface, "kind": x.kind}
                        for x in own
                    ]
                    orders.setdefault(source, []).append({"rank": target, "wires": offers})
        return orders

    def measured(self, source: int, speeds: Sequence[Mapping[str, Any]]) -> None:
        """Take a rank's measurements, in MB/s; raises ProtocolError for an impossible speed."""
        for found in speeds:
            target, speed = int(found["rank"]), float(found["mb_per_s"])
            if not 0.0 <= speed < math.inf:
                raise ProtocolError(f"a measured speed of {speed!r} MB/s")
            pair = min(source, target), max(source, target)
            for item in self._wires.get(pair, ()):
                same = (item.source, item.address, item.local_iface) == (
                    source, found["address"], found["iface"],
                )  # fmt: skip
                if same and self._measured[pair]:
                    self._measured[pair][-1][wire_of(item)] = speed

    def _again(self, wires: Sequence[Attempt], known: Known) -> List[Dict[Wire, float]]:
        """Return earlier measurements of the same wires."""
        names = {self._host_wire(wire): wire for wire in map(wire_of, wires)}
        speeds = known.get(frozenset(names), ())
        return [{names[wire]: speed for wire, speed in found.items()} for found in speeds]

    def _host_wire(self, wire: Wire) -> HostWire:
        ends = ((self._leaders[rank], iface) for rank, iface in wire)
        return frozenset((leader.host, leader.machine, iface) for leader, iface in ends)

    def known(self) -> Known:
        """Return the measurements, for later generations."""
        return {
            frozenset(self._host_wire(wire_of(item)) for item in self._wires[pair]): [
                {self._host_wire(wire): speed for wire, speed in found.items()} for found in speeds
            ]
            for pair, speeds in self._measured.items() if speeds and self._wires.get(pair)
        }  # fmt: skip

    def routes(self) -> Routes:
        """Return one route for each pair of hosts; raises NoRoute if there is none between two of them."""
        routes: Routes = {}
        for pair, wires in sorted(self._wires.items()):
            low, high = (self._leaders[rank] for rank in pair)
            chosen = choose(wires, self._measured[pair]) if wires else None
            if chosen is None and self._relayed:
                routes[low.host_index, high.host_index] = relayed(*pair)
                continue
            if chosen is None:
                raise NoRoute(_no_route(low, high, self._tried[pair]), pair)
            routes[low.host_index, high.host_index] = self._with_speed(pair, wires[chosen])
        return routes

    def _with_speed(self, pair: Pair, item: Attempt) -> Attempt:
        """Return the attempt, with the lowest of the speeds measured on its wire."""
        speeds = [found[wire_of(item)] for found in self._measured[pair] if wire_of(item) in found]
        return item._replace(mb_per_s=min(speeds) if speeds else None)

    def ways(self) -> Dict[int, List[Dict[str, Any]]]:
        """Return, by host, how its ranks reach those of the other hosts, as it is sent to them. Raises
        NoRoute if there is no route between two of them.
        """
        found: Dict[int, List[Dict[str, Any]]] = {}
        for route in self.routes().values():
            for end, other in ((route.source, route.target), (route.target, route.source)):
                way = {
                    "host": self._leaders[other].host_index, "dial": end == route.source,
                    "address": route.address, "iface": route.local_iface, "relayed": route.kind == RELAYED,
                }  # fmt: skip
                found.setdefault(self._leaders[end].host_index, []).append(way)
        return found


def routes_of(
    own: Member, members: Sequence[Member], ways: Sequence[Mapping[str, Any]]
) -> List[Dict[str, Any]]:
    """Return for every peer whether to dial it, at which addresses in this order, and by which interface,
    from the host's :meth:`Routing.ways`. On a relayed route both dial the relay, and the end that would dial
    the other begins the handshake.
    """
    by_host = {int(way["host"]): way for way in ways}
    result = []
    for peer in members:
        way = by_host.get(peer.host_index)
        if peer.rank == own.rank:
            continue
        if peer.host_index == own.host_index:
            # A Unix socket first, then the loopback; the rest in case two containers pass for one host.
            addresses = sorted(peer.addresses, key=lambda item: _NEAREST.get(str(item.get("kind")), 2))
            route = {"dial": own.rank > peer.rank, "iface": "", "relayed": False}
        elif way is not None:
            addresses = [item for item in peer.addresses if item.get("address") == way["address"]]
            route = {name: way[name] for name in ("dial", "iface", "relayed")}
        else:
            addresses, route = [], {"dial": False, "iface": "", "relayed": False}
        result.append({"peer": peer.rank, "addresses": addresses, **route})
    return result


def _no_route(low: Located, high: Located, attempts: Sequence[Attempt]) -> str:
    names = {low.rank: low.host, high.rank: high.host}
    return (
        f"{low.host} and {high.host} cannot reach each other. Tried:\n{explain_no_route(names, attempts)}\n"
        "Check that both are on one network and that no firewall blocks TCP between them "
        f"(`ringrun doctor -H {low.host},{high.host}` shows the direction); --iface chooses interfaces. "
        "An encrypted job (--encrypt) is relayed between such hosts."
    )


class Linking:
    """The probes, the measurements, the routes and the links of one generation. ``members``: in rank order,
    with hosts and local ranks assigned; ``known``: measurements of earlier generations.
    """

    def __init__(
        self,
        members: Sequence[Member],
        generation: int,
        known: Optional[Known] = None,
        relay: RelayHost = NO_RELAY,
    ) -> None:
        self._members = list(members)
        self._relay, self._most_relayed = relay
        self._generation = generation
        self._known = known or {}
        self._leaders = [member for member in members if member.local_rank == 0]
        # probes and measurements have ended: :meth:`link` can choose
        self.probed_all = len(self._leaders) == 1
        self._probing = {leader.rank for leader in self._leaders}
        self._reports: Dict[int, List[Attempt]] = {}
        self._measuring: Set[int] = set()
        self._routing = Routing((), {})
        self._routes: Routes = {}
        self._links: Dict[int, List[Dict[str, Any]]] = {}
        self._unlinked = len(self._members)

    def begin(self) -> List[Action]:
        """Send every member its rank, and the first ranks of the hosts their targets to probe."""
        rows = [member.describe() for member in self._members]
        return [Send(member.connection, self._assignment(member, rows)) for member in self._members]

    def _assignment(self, member: Member, rows: List[Dict[str, Any]]) -> Message:
        others = [leader for leader in self._leaders if leader is not member]
        return {
            "type": "probe",
            "rank": member.rank,
            "generation": self._generation,
            "members": rows,
            "targets": [as_target(other.located) for other in others] if member.local_rank == 0 else [],
        }

    def probed(self, member: Member, message: Message) -> List[Action]:
        """Take the attempts of a host's first rank."""
        if member.rank not in self._probing:
            return []
        attempts = [Attempt.from_json(item)._replace(source=member.rank) for item in message["attempts"]]
        self._reports[member.rank] = attempts
        self._probing.discard(member.rank)
        if self._probing:
            return []
        self._routing = Routing(
            [leader.located for leader in self._leaders], self._reports, self._known, bool(self._relay)
        )
        return self._measure()

    def measured(self, member: Member, message: Message) -> List[Action]:
        """Take the measurements of a host's first rank."""
        if member.rank not in self._measuring:
            return []
        self._routing.measured(member.rank, message["speeds"])
        self._measuring.discard(member.rank)
        return [] if self._measuring else self._measure()

    def _measure(self) -> List[Action]:
        wanted = self._routing.wanted()
        self.probed_all = not wanted
        self._measuring = set(wanted)
        requests = ((self._members[rank], pairs) for rank, pairs in wanted.items())
        return [Send(item.connection, {"type": "measure", "pairs": pairs}) for item, pairs in requests]

    def known(self) -> Known:
        """Return the measurements between hosts, for later generations."""
        return {**self._known, **self._routing.known()}

    def link(self) -> List[Action]:
        """Choose routes, and have every rank build its links. Raises NoRoute between unreachable hosts."""
        self._routes = self._routing.routes()
        self._check_relayed()
        ways = self._routing.ways()
        routes = (
            (item.connection, routes_of(item, self._members, ways.get(item.host_index, [])))
            for item in self._members
        )
        return [Send(connection, {"type": "link", "routes": found}) for connection, found in routes]

    def relayed_hosts(self) -> List[Tuple[int, int]]:
        """Return the pairs of hosts, by their numbers, whose links are relayed."""
        return [hosts for hosts, route in sorted(self._routes.items()) if route.kind == RELAYED]

    def _check_relayed(self) -> None:
        hosts, counts = self.relayed_hosts(), Counter(member.host_index for member in self._members)
        links = sum(counts[low] * counts[high] for low, high in hosts)
        if links > self._most_relayed:
            text = (
                f"{self.relayed_text()}, and that is possible for {self._most_relayed} pairs of ranks, not "
                f"for {links}. Raise the limit of open files there (`ulimit -n`), or connect the hosts."
            )
            first = {leader.host_index: leader.rank for leader in self._leaders}
            raise NoRoute(text, (first[hosts[0][0]], first[hosts[0][1]]))

    def relays(self, source: int, target: int) -> bool:
        """Return whether the link between two ranks is relayed."""
        if not (0 <= source < len(self._members) and 0 <= target < len(self._members)):
            return False
        one, other = (self._members[rank].host_index for rank in (source, target))
        return (min(one, other), max(one, other)) in self.relayed_hosts()

    def relayed_text(self) -> str:
        """Return a sentence about the hosts that are relayed; "" if none are."""
        names = {leader.host_index: leader.host for leader in self._leaders}
        pairs = self.relayed_hosts()
        shown = [f"{names[low]} and {names[high]}" for low, high in pairs[:3]]
        if len(pairs) > len(shown):
            shown.append(f"{len(pairs) - len(shown)} more pairs of hosts")
        return f"{', '.join(shown)} cannot reach each other: relayed over {self._relay}" if shown else ""

    def linked(self, member: Member, links: List[Dict[str, Any]]) -> bool:
        """Note that a rank has an authenticated link to every other; return whether all ranks have. Raises
        ProtocolError if it reports a link to a rank that does not exist.
        """
        check_ranges(links, len(self._members))
        self._unlinked -= not member.linked
        member.linked = True
        self._links[member.rank] = links
        return not self._unlinked

    def rows(self) -> List[Dict[str, Any]]:
        """Return the first rows of the table of links; see :func:`.link_rows`."""
        return link_rows(self._members, self._links, self._routes, self._relay)


MAX_LINES = 500
"""Of the table as text: a message may have 4 MiB."""
MAX_ROWS = 2016
"""Of the table: all links of 64 ranks. A thousand ranks have half a million links."""


def ranges_of(ranks: Iterable[int]) -> List[List[int]]:
    """Return ranks as ranges, each its first and its last.

    >>> ranges_of([5, 1, 2, 3])
    [[1, 3], [5, 5]]
    """
    ranges: List[List[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ranges


def check_ranges(links: Sequence[Mapping[str, Any]], size: int) -> None:
    """Raise ProtocolError unless the peers in a report of links are ranges of the job's ranks."""
    for link in links:
        for item in link["peers"]:
            whole = isinstance(item, list) and len(item) == 2 and all(type(end) is int for end in item)
            if not whole or not 0 <= item[0] <= item[1] < size:
                raise ProtocolError(f"a report of links to ranks that do not exist: {str(item)[:40]}")


def link_rows(
    members: Sequence[Member],
    links: Mapping[int, Sequence[Mapping[str, Any]]],
    routes: Routes,
    relay: str = "",
) -> List[Dict[str, Any]]:
    """Return one row for each pair of ranks, from both sides' reports: the first :data:`MAX_ROWS`. ``links``:
    by rank, the groups of peers that it reaches from the same address; ``relay``: the host that relays.
    """
    rows = []
    for member, peer in itertools.islice(itertools.combinations(members, 2), MAX_ROWS):
        near, far = _end(links, member, peer), _end(links, peer, member)
        if near is None:
            continue
        route = routes.get((min(member.host_index, peer.host_index), max(member.host_index, peer.host_index)))
        rows.append(
            {
                "rank": member.rank,
                "host": member.host,
                "iface": near["iface"],
                "address": near["local"],
                "peer": peer.rank,
                "peer_host": peer.host,
                "peer_iface": "?" if far is None else far["iface"],
                "peer_address": "?" if far is None else far["local"],
                "mb_per_s": None if route is None else route.mb_per_s,
                "relay": relay if route is not None and route.kind == RELAYED else "",
            }
        )
    return rows


def _end(
    links: Mapping[int, Sequence[Mapping[str, Any]]], member: Member, peer: Member
) -> Optional[Mapping[str, Any]]:
    """Return one end of a link, as the rank there has reported it."""
    for link in links.get(member.rank, ()):
        if any(first <= peer.rank <= last for first, last in link["peers"]):
            return link
    return None


def link_table(rows: Sequence[Mapping[str, Any]], size: int) -> str:
    """Return the first rows as aligned text."""
    cells = [
        (
            f"rank {row['rank']} ({row['host']})",
            f"{row['iface']} {row['address']}",
            "<->",
            f"{row['peer_iface']} {row['peer_address']}",
            f"rank {row['peer']} ({row['peer_host']})",
            f"relayed over {row['relay']}" if row["relay"]
            else f"{row['mb_per_s']:.0f} MB/s" if row["mb_per_s"] else "",
        )
        for row in rows[:MAX_LINES]
    ]  # fmt: skip
    widths = [max((len(line[column]) for line in cells), default=0) for column in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    left = size * (size - 1) // 2 - MAX_LINES
    more = [f"and {left} more"] if left > 0 else []
    return "\n".join(["links:"] + ["  " + line for line in [*lines, *more]])
