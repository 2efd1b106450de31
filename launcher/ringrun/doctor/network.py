"""Examines hosts and the network between them, over the routes of a job's ranks.

The hosts' programs listen, dial and measure as the first ranks of a job's hosts do, and
:class:`~ringcomm.rendezvous.routing.Routing` chooses between their results, as it does for a job. Then only
the chosen routes are measured for the report.
"""

from __future__ import annotations

import ipaddress
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.rendezvous.links import PROBE_AGAIN_S, PROBE_S
from ringcomm.rendezvous.membership import as_target
from ringcomm.rendezvous.routing import Pair, Routing, with_second_round
from ringcomm.transport.routes import Attempt, pairings

from ..plan.job import Job
from ..reach.base import AT_ONCE
from .hosts import ANSWER_LIMIT_S, HostProbe

ENOUGH_MB_PER_S = 120.0
"""A faster route is not measured again: it has more than 1 Gbit/s."""
MEASUREMENTS = 3
"""The best counts: other load makes a route look slower, never faster."""


class ProbedHost(NamedTuple):
    """A host in the form of a job's rendezvous: each has one rank, with the host's number."""

    rank: int
    host: str
    host_index: int
    local_rank: int
    machine: str
    addresses: List[Dict[str, Any]]


class Route(NamedTuple):
    """The route between the ranks of two hosts."""

    chosen: Attempt  # a job's choice; its source dials
    # bytes/s by (source, target), both directions at the same time; None: no data
    speeds: Dict[Pair, Optional[float]]

    def iface(self, host: int) -> str:
        """Return the interface of one of the two hosts."""
        return self.chosen.local_iface if host == self.chosen.source else self.chosen.remote_iface


class Examination(NamedTuple):
    """All results. Hosts have numbers in the order of their names on the command line; lists are by host."""

    hosts: List[str]
    slots: List[int]  # ranks that each would run
    problems: List[str]  # why it does not answer, or ""
    noises: List[str]  # output of its login shell
    starts_s: List[float]  # duration of the login
    facts: List[Optional[Dict[str, Any]]]  # of doctor.facts.collect
    local: int  # the number of this machine, or -1
    unheard: Dict[int, str]  # why it cannot accept connections
    ahead_s: Dict[int, Tuple[float, float]]  # its clock less this machine's, and the error
    tried: Dict[Pair, List[Attempt]]  # all attempts between two hosts, the lower number first
    routes: Dict[Pair, Route]
    shipped: FrozenSet[int] = frozenset()  # hosts that get the files of the job (--ship)
    provision: bool = False  # hosts get missing packages (--provision)

    def interfaces(self, host: int) -> List[Dict[str, Any]]:
        """Return the facts about all interfaces of a host."""
        return list((self.facts[host] or {}).get("interfaces", ()))

    def interface(self, host: int, name: str) -> Dict[str, Any]:
        """Return the facts about an interface; empty if there are none."""
        return next((row for row in self.interfaces(host) if row["name"] == name), {})

    def common_network(self, source: int, target: int, address: str) -> Optional[Tuple[str, str]]:
        """Return a host's interface in the network of another host's address, and the network, or None."""
        there = [f"{own}/{bits}" for _, own, bits in self._addresses(target) if own == address]
        for text in there:
            network = ipaddress.ip_interface(text).network
            for name, own, bits in self._addresses(source):
                if ipaddress.ip_interface(f"{own}/{bits}").network == network:
                    return name, str(network)
        return None

    def _addresses(self, host: int) -> Iterator[Tuple[str, str, int]]:
        for row in self.interfaces(host):
            for address, bits in row["addresses"]:
                yield row["name"], address, bits


def examine(job: Job) -> Examination:
    """Start a program on each host, have them dial and measure each other, and end them. The job's command is
    not run. ProtocolError if a host's answer is not valid.
    """
    probes = [HostProbe(host) for host in job.hosts]
    with ThreadPoolExecutor(max(1, len(probes))) as pool:
        try:
            with ThreadPoolExecutor(AT_ONCE) as logins:
                list(logins.map(lambda item: item.start(), probes))
            facts = list(pool.map(lambda item: item.ask(do="facts", cwd=item.host.cwd), probes))
            local = next((host.index for host in job.hosts if host.is_local), -1)
            found = Examination(
                [host.name for host in job.hosts], [host.planned.used for host in job.hosts], [],
                [item.noise for item in probes], [item.start_s for item in probes], facts,
                local, {}, {}, {}, {},
                frozenset(host.index for host in job.hosts if host.gets_code and job.tree is not None),
                job.provision,
            )  # fmt: skip
            _Network(job, probes, pool, found).examine()
        finally:
            list(pool.map(lambda item: item.end(), probes))
    return found._replace(problems=[item.problem for item in probes])


class _Network:
    """Has the hosts' programs dial and measure each other; `found` gets the results."""

    def __init__(
        self, job: Job, probes: Sequence[HostProbe], pool: Executor, found: Examination
    ) -> None:
        self._job, self._probes, self._pool, self._found = job, probes, pool, found
        self._places: Dict[int, ProbedHost] = {}

    def examine(self) -> None:
        self._listen()
        routing = self._dial()
        self._choose(routing)
        self._measure()

    def _ask(self, asked: Mapping[int, Mapping[str, Any]], limit_s: float) -> Dict[int, Any]:
        """Return the answers of these hosts to commands, without hosts that fail."""
        rows = self._pool.map(lambda pair: self._probes[pair[0]].ask(limit_s, **pair[1]), asked.items())
        return {index: answer for index, answer in zip(asked, rows) if answer is not None}

    def _listen(self) -> None:
        job, found = self._job, self._found
        common: Dict[str, Any] = {
            "do": "listen", "key": job.key.hex(), "job": job.id, "certificate": job.certificate,
        }  # fmt: skip

        def ask(index: int) -> Tuple[Any, float, float]:
            iface = job.hosts[index].env.get("RINGCOMM_IFACE", "")
            began_s, started_s = time.time(), time.monotonic()
            answer = self._probes[index].ask(rank=index, iface=iface, **common)
            took_s = time.monotonic() - started_s
            return answer, began_s + took_s / 2, took_s / 2

        for index, (answer, at_s, error_s) in enumerate(self._pool.map(ask, range(len(self._probes)))):
            if answer is not None and "problem" in answer:
                found.unheard[index] = answer["problem"]
            elif answer is not None:
                found.ahead_s[index] = answer["time_s"] - at_s, error_s
                self._places[index] = ProbedHost(
                    index, found.hosts[index], index, 0, answer["machine"], answer["addresses"]
                )

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
        """Run both rounds of probes, as a job does."""
        places = self._places
        everything = {
            index: [as_target(other) for other in places.values() if other.rank != index] for index in places
        }
        reports = self._probe(everything, PROBE_S)
        leaders = list(places.values())
        again = Routing(leaders, reports).to_probe_again()
        for index, attempts in self._probe(again, PROBE_AGAIN_S).items():
            reports[index] = with_second_round(reports.get(index, ()), attempts)
        return Routing(leaders, reports)

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
            ways = (chosen.source, chosen.target), (chosen.target, chosen.source)
            self._found.routes[pair] = Route(chosen, dict.fromkeys(ways))

    def _run(self, wanted: Mapping[int, List[Dict[str, Any]]]) -> Dict[int, Any]:
        asked = {index: {"do": "measure", "pairs": pairs} for index, pairs in wanted.items()}
        return self._ask(asked, ANSWER_LIMIT_S * max(map(len, wanted.values()), default=1))

    def _measure(self) -> None:
        """Measure the chosen routes, in rounds in which no host occurs twice."""
        for some in pairings(range(len(self._probes))):
            pairs = [pair for pair in some if pair in self._found.routes]
            for _ in range(MEASUREMENTS):
                if pairs:
                    self._measure_once(pairs)
                pairs = [pair for pair in pairs if not _is_enough(self._found.routes[pair])]

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
                    speeds[way] = max(speed * 1e6, speeds[way] or 0.0) or None


def _is_enough(route: Route) -> bool:
    return all(speed is not None and speed >= ENOUGH_MB_PER_S * 1e6 for speed in route.speeds.values())
