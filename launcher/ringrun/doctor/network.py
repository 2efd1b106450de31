"""Examines hosts and the network between them, over the routes of a job's ranks.

The hosts' programs listen, dial and measure as the first ranks of a job's hosts do, and
:class:`~ringcomm.rendezvous.routing.Routing` chooses between their results, as it does for a job. Then only
the chosen routes are measured for the report.
"""

from __future__ import annotations

import ipaddress
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.rendezvous.links import PROBE_S
from ringcomm.rendezvous.membership import Located, as_target
from ringcomm.rendezvous.routing import Pair, Routing
from ringcomm.transport.nics import Attempt, pairings

from ..plan.job import Job
from ..reach.base import AT_ONCE
from .hosts import ANSWER_LIMIT_S, HostProbe

SLOW_MB_PER_S = 30.0
"""A slower route is reported, if it is that slow in each of :data:`MEASUREMENTS`: other load on the hosts
makes a route look slower, never faster."""
MEASUREMENTS = 3


class Route(NamedTuple):
    """The route between the ranks of two hosts."""

    chosen: Attempt  # a job's choice; its source dials
    # MB/s by (source, target), both directions at the same time; 0: no data
    speeds: Dict[Pair, float]

    @property
    def is_slow(self) -> bool:
        return min(self.speeds.values()) < SLOW_MB_PER_S

    def iface(self, host: int) -> str:
        """Return the interface of one of the two hosts."""
        return self.chosen.local_iface if host == self.chosen.source else self.chosen.remote_iface


class Examination(NamedTuple):
    """All results. Hosts have numbers in the order of their names on the command line; lists are by host."""

    job: Job
    problems: List[str]  # why it does not answer, or ""
    noises: List[str]  # output of its login shell
    facts: List[Optional[Dict[str, Any]]]  # of doctor.probe.collect
    unheard: Dict[int, str]  # why it cannot accept connections
    tried: Dict[Pair, List[Attempt]]  # all attempts between two hosts, the lower number first
    routes: Dict[Pair, Route]

    @property
    def hosts(self) -> List[str]:
        return [host.name for host in self.job.hosts]

    def common_network(self, source: int, target: int, address: str) -> Optional[str]:
        """Return the network of a host's address in which another host is, too; or None."""
        there = {network for own, network in self._networks(target) if own == address}
        return next((str(network) for _, network in self._networks(source) if network in there), None)

    def _networks(self, host: int) -> Iterator[Tuple[str, Any]]:
        for iface in (self.facts[host] or {}).get("interfaces", ()):
            for address, bits in iface["addresses"]:
                yield address, ipaddress.ip_interface(f"{address}/{bits}").network


def examine(job: Job) -> Examination:
    """Start a program on each host, have them dial and measure each other, and end them."""
    probes = [HostProbe(host) for host in job.hosts]
    with ThreadPoolExecutor(max(1, len(probes))) as pool:
        try:
            with ThreadPoolExecutor(AT_ONCE) as logins:
                list(logins.map(lambda item: item.start(), probes))
            facts = list(pool.map(lambda item: item.ask(do="facts", cwd=item.host.cwd), probes))
            found = Examination(job, [], [item.noise for item in probes], facts, {}, {}, {})
            _Network(probes, pool, found).examine()
        finally:
            list(pool.map(lambda item: item.end(), probes))
    return found._replace(problems=[item.problem for item in probes])


class _Network:
    """Has the hosts' programs dial and measure each other; `found` gets the results."""

    def __init__(self, probes: Sequence[HostProbe], pool: Executor, found: Examination) -> None:
        self._probes, self._pool, self._found = probes, pool, found
        self._places: Dict[int, Located] = {}

    def examine(self) -> None:
        self._listen()
        routing = self._dial()
        self._choose(routing)
        self._measure()

    def _ask(
        self, asked: Mapping[int, Mapping[str, Any]], limit_s: float = ANSWER_LIMIT_S
    ) -> Dict[int, Any]:
        """Return the answers of these hosts to commands, without hosts that fail."""
        rows = self._pool.map(lambda pair: self._probes[pair[0]].ask(limit_s, **pair[1]), asked.items())
        return {index: answer for index, answer in zip(asked, rows) if answer is not None}

    def _listen(self) -> None:
        job, found = self._found.job, self._found
        common = {"do": "listen", "key": job.key.hex(), "job": job.id, "certificate": job.certificate}
        asked = {
            index: {**common, "rank": index, "iface": host.env.get("RINGCOMM_IFACE", "")}
            for index, host in enumerate(job.hosts)
        }
        for index, answer in self._ask(asked).items():
            if "problem" in answer:
                found.unheard[index] = answer["problem"]
            else:
                offers, machine = answer.get("addresses", []), answer.get("machine", "")
                self._places[index] = Located(index, found.hosts[index], index, 0, machine, offers)

    def _probe(self, targets: Mapping[int, List[Dict[str, Any]]], limit_s: float) -> Dict[int, List[Attempt]]:
        asked = {
            index: {"do": "probe", "targets": some, "within_s": limit_s} for index, some in targets.items()
        }
        answers = self._ask(asked, limit_s + ANSWER_LIMIT_S)
        return {
            index: [attempt._replace(source=index) for attempt in rows]
            for index, rows in answers.items()
        }

    def _dial(self) -> Routing:
        """Have all hosts dial each other, as a job does."""
        places = self._places
        everything = {
            index: [as_target(other) for other in places.values() if other.rank != index] for index in places
        }
        reports = self._probe(everything, PROBE_S)
        return Routing(list(places.values()), reports)

    def _choose(self, routing: Routing) -> None:
        """Measure where there is a choice, and choose, as a job does."""
        while True:
            wanted = routing.wanted()
            if not wanted:
                break
            for index, speeds in self._run(wanted).items():
                routing.measured(index, speeds)
        for low in self._places:
            for high in self._places:
                if low < high:
                    self._found.tried[low, high] = routing.tried((low, high))
        routing.leave_out(routing.unreached())
        for pair, chosen in routing.routes().items():
            self._found.routes[pair] = Route(chosen, dict.fromkeys((pair, pair[::-1]), 0.0))

    def _run(self, wanted: Mapping[int, List[Dict[str, Any]]]) -> Dict[int, Any]:
        asked = {index: {"do": "measure", "pairs": pairs} for index, pairs in wanted.items()}
        return self._ask(asked, ANSWER_LIMIT_S * max(map(len, wanted.values()), default=1))

    def _measure(self) -> None:
        """Measure the chosen routes, in rounds in which no host occurs twice."""
        routes = self._found.routes
        for some in pairings(range(len(self._probes))):
            for _ in range(MEASUREMENTS):
                pairs = [pair for pair in some if pair in routes and routes[pair].is_slow]
                if pairs:
                    self._measure_once(pairs)

    def _measure_once(self, pairs: Sequence[Pair]) -> None:
        wanted: Dict[int, List[Dict[str, Any]]] = {}
        for pair in pairs:
            item = self._found.routes[pair].chosen
            wire = {"address": item.address, "port": item.port, "iface": item.local_iface}
            wanted[item.source] = [{"rank": item.target, "wires": [wire]}]
        for source, rows in self._run(wanted).items():
            for row in rows:
                there = (source, row["rank"])
                speeds = self._found.routes[min(there), max(there)].speeds
                for way, speed in ((there, row["there_mb_per_s"]), (there[::-1], row["back_mb_per_s"])):
                    speeds[way] = max(speed, speeds[way])
