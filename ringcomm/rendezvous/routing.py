"""How the members of one generation connect: probes, measurements, routes, links, and their table. Pure.

The first ranks of the hosts probe which addresses lead where, and measure where several networks connect two
hosts (:class:`Linking`). From that :class:`Routing` chooses one route for each pair of hosts. Then every rank
builds its links.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from ..errors import ProtocolError
from ..transport.nics import (
    LOCAL,
    LOOPBACK,
    RELAYED,
    Attempt,
    Wire,
    candidates,
    choose,
    explain_no_route,
    relayed,
    wire_of,
)
from ..wire.messages import Message, is_range
from .membership import NO_RELAY, Action, Located, Process, RelayHost, Send, as_target

_NEAREST = {LOCAL: 0, LOOPBACK: 1}

Routes = Dict[Tuple[int, int], Attempt]  # by the indices of two hosts, the lower one first

Pair = Tuple[int, int]  # the first ranks of two hosts, the lower one first

MAX_WIRES = 6  # maximum number of wires measured between two hosts, the preferred ones
MAX_TURNS = 12  # with more hosts than that, those that measure do not wait for each other


class NoRoute(Exception):
    """Two hosts cannot reach each other; the text lists the addresses tried and why each failed."""

    def __init__(self, text: str, ranks: Pair) -> None:
        super().__init__(text)
        self.ranks = ranks  # the first ranks of the two hosts


class Routing:
    """Derives one route for each pair of hosts from the attempts of their first ranks (``leaders``). Where
    several wires connect two hosts, one of them measures: :meth:`wanted` returns the measurements that each
    rank must make, and after all results (:meth:`measured`) the next ones. Hosts that cannot reach each other
    are ``relayed``, if that is possible.
    """

    def __init__(
        self, leaders: Sequence[Located], reports: Mapping[int, Sequence[Attempt]], relayed: bool = False
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
        self._measured: Dict[Pair, List[Dict[Wire, float]]] = {pair: [] for pair in self._tried}

    def unreached(self) -> List[Pair]:
        """Return the pairs of hosts of which neither end has reached the other."""
        return [pair for pair, wires in self._wires.items() if not wires]

    def leave_out(self, pairs: Sequence[Pair]) -> None:
        """Choose no routes for these pairs."""
        for pair in pairs:
            self._wires.pop(pair)

    def tried(self, pair: Pair) -> List[Attempt]:
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

    def routes(self) -> Routes:
        """Return one route for each pair of hosts; raises NoRoute if there is none between two of them."""
        routes: Routes = {}
        for pair, wires in sorted(self._wires.items()):
            low, high = (self._leaders[rank] for rank in pair)
            chosen = choose(wires, self._measured[pair]) if wires else None
            if chosen is None and not self._relayed:
                tried = explain_no_route({low.rank: low.host, high.rank: high.host}, self._tried[pair])
                raise NoRoute(
                    f"{low.host} and {high.host} cannot reach each other. Tried:\n{tried}\nCheck that both "
                    "are on one network and that no firewall blocks TCP between them (`ringrun doctor -H "
                    f"{low.host},{high.host}` shows the direction); --iface chooses interfaces. An encrypted "
                    "job (--encrypt) is relayed between such hosts.",
                    pair,
                )
            route = relayed(*pair) if chosen is None else wires[chosen]
            speeds = [found[wire_of(route)] for found in self._measured[pair] if wire_of(route) in found]
            routes[low.host_index, high.host_index] = route._replace(mb_per_s=min(speeds, default=None))
        return routes


class Linking:
    """The probes, measurements, routes and links of one generation, whose members are in rank order."""

    def __init__(self, members: Sequence[Process], generation: int, relay: RelayHost = NO_RELAY) -> None:
        self._members = list(members)
        self._relay, self._most_relayed = relay
        self._generation = generation
        self._leaders = [member for member in members if member.local_rank == 0]
        self._awaited = {leader.rank for leader in self._leaders}  # with attempts or measurements to come
        self._reports: Dict[int, List[Attempt]] = {}
        self._routing: Optional[Routing] = None  # once all attempts are known
        self._routes: Routes = {}
        self._links: Dict[int, List[Dict[str, Any]]] = {}

    @property
    def probed_all(self) -> bool:
        """Return whether probes and measurements have ended, so that :meth:`link` can choose."""
        return self._routing is not None and not self._awaited

    def begin(self) -> List[Action]:
        """Send every member its rank, and the first ranks of the hosts their targets to probe."""
        rows = [member.describe() for member in self._members]
        if len(self._leaders) == 1:
            self._awaited, self._routing = set(), Routing(self._leaders, {})
        return [Send(member.connection, self._assignment(member, rows)) for member in self._members]

    def _assignment(self, member: Process, rows: List[Dict[str, Any]]) -> Message:
        others = [leader for leader in self._leaders if leader is not member]
        return {
            "type": "probe",
            "rank": member.rank,
            "generation": self._generation,
            "members": rows,
            "targets": [as_target(other) for other in others] if member.local_rank == 0 else [],
        }

    def probed(self, member: Process, message: Message) -> List[Action]:
        if self._routing is not None or member.rank not in self._awaited:
            return []
        attempts = [Attempt.from_json(item)._replace(source=member.rank) for item in message["attempts"]]
        self._reports[member.rank] = attempts
        self._awaited.discard(member.rank)
        if self._awaited:
            return []
        self._routing = Routing(self._leaders, self._reports, bool(self._relay))
        return self._measure(self._routing)

    def measured(self, member: Process, message: Message) -> List[Action]:
        if self._routing is None or member.rank not in self._awaited:
            return []
        self._routing.measured(member.rank, message["speeds"])
        self._awaited.discard(member.rank)
        return [] if self._awaited else self._measure(self._routing)

    def _measure(self, routing: Routing) -> List[Action]:
        wanted = routing.wanted()
        self._awaited = set(wanted)
        requests = ((self._members[rank], pairs) for rank, pairs in wanted.items())
        return [Send(item.connection, {"type": "measure", "pairs": pairs}) for item, pairs in requests]

    def link(self) -> List[Action]:
        """Choose routes, and have every rank build its links. Raises NoRoute between unreachable hosts."""
        assert self._routing is not None
        self._routes = self._routing.routes()
        self._check_relayed()
        found = (
            (own, [self._route(own, peer) for peer in self._members if peer is not own])
            for own in self._members
        )
        return [Send(own.connection, {"type": "link", "routes": routes}) for own, routes in found]

    def _route(self, own: Process, peer: Process) -> Dict[str, Any]:
        """Return whether to dial a peer, at which addresses in this order, and by which interface. On a
        relayed route both dial the relay, and the end that would dial the other begins the handshake.
        """
        if peer.host_index == own.host_index:
            # A Unix socket first, then the loopback; the rest in case two containers pass for one host.
            addresses = sorted(peer.addresses, key=lambda item: _NEAREST.get(str(item.get("kind")), 2))
            dials, iface, is_relayed = own.rank > peer.rank, "", False
        else:
            route = self._between(own, peer)
            addresses = [item for item in peer.addresses if item.get("address") == route.address]
            dials = self._members[route.source].host_index == own.host_index
            iface, is_relayed = route.local_iface, route.kind == RELAYED
        return {
            "peer": peer.rank, "addresses": addresses, "dial": dials, "iface": iface, "relayed": is_relayed
        }  # fmt: skip

    def _between(self, one: Process, other: Process) -> Attempt:
        hosts = one.host_index, other.host_index
        return self._routes[min(hosts), max(hosts)]

    def relayed_hosts(self) -> List[Tuple[int, int]]:
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
        if not (0 <= source < len(self._members) and 0 <= target < len(self._members)):
            return False
        one, other = self._members[source], self._members[target]
        return one.host_index != other.host_index and self._between(one, other).kind == RELAYED

    def relayed_text(self) -> str:
        """Return a sentence about the hosts that are relayed; "" if none are."""
        names = {leader.host_index: leader.host for leader in self._leaders}
        pairs = self.relayed_hosts()
        shown = [f"{names[low]} and {names[high]}" for low, high in pairs[:3]]
        if len(pairs) > len(shown):
            shown.append(f"{len(pairs) - len(shown)} more pairs of hosts")
        return f"{', '.join(shown)} cannot reach each other: relayed over {self._relay}" if shown else ""

    def linked(self, member: Process, links: List[Dict[str, Any]]) -> bool:
        """Note a rank's links to all others; return whether all have theirs. Raises ProtocolError."""
        for link in links:
            for item in link["peers"]:
                if not is_range(item) or item[1] >= len(self._members):
                    raise ProtocolError(f"a report of links to ranks that do not exist: {str(item)[:40]}")
        self._links[member.rank] = links
        return len(self._links) == len(self._members)

    def rows(self) -> List[Dict[str, Any]]:
        """Return the first rows of the table of links; see :func:`.link_rows`."""
        return link_rows(self._members, self._links, self._routes, self._relay)


MAX_LINES = 500  # of the table as text: a message may have 4 MiB
MAX_ROWS = 2016  # of the table: all links of 64 ranks. A thousand ranks have half a million links.


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


def link_rows(
    members: Sequence[Process], links: Mapping[int, Sequence[Mapping[str, Any]]], routes: Routes,
    relay: str = "",
) -> List[Dict[str, Any]]:  # fmt: skip
    """Return a row for each pair of ranks, the first :data:`MAX_ROWS`; ``relay``: the host that relays."""
    rows = []
    for member, peer in itertools.islice(itertools.combinations(members, 2), MAX_ROWS):
        near, far = _end(links, member, peer), _end(links, peer, member)
        if near is None:
            continue
        route = routes.get((min(member.host_index, peer.host_index), max(member.host_index, peer.host_index)))
        rows.append(
            {
                "rank": member.rank, "host": member.host, "iface": near["iface"], "address": near["local"],
                "peer": peer.rank, "peer_host": peer.host, "peer_iface": "?" if far is None else far["iface"],
                "peer_address": "?" if far is None else far["local"],
                "mb_per_s": None if route is None else route.mb_per_s,
                "relay": relay if route is not None and route.kind == RELAYED else "",
            }  # fmt: skip
        )
    return rows


def _end(
    links: Mapping[int, Sequence[Mapping[str, Any]]], member: Process, peer: Process
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
