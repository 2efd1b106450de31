"""``ringrun doctor``: examines hosts and the network between them, and reports the problems with remedies.

The hosts' programs listen, dial and measure as the first ranks of a job's hosts do, and
:class:`~ringcomm.rendezvous.routing.Routing` chooses between their results, as it does for a job. Then only
the chosen routes are measured for the report.
"""

from __future__ import annotations

import ipaddress
import json
import textwrap
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.rendezvous.links import PROBE_S
from ringcomm.rendezvous.membership import Located, as_target
from ringcomm.rendezvous.routing import Pair, Routing
from ringcomm.transport.nics import PREFERENCE, VIRTUAL, Attempt, pairings

from ..job.launch import prepare
from ..plan.job import Job
from ..plan.options import Options
from ..plan.ranks import counted
from ..reach.base import AT_ONCE, quoted
from .hosts import ANSWER_LIMIT_S, HostProbe

WIDTH = 100  # of the report


def run_doctor(options: Options, as_data: bool) -> Tuple[str, int]:
    """Examine hosts and the network between them; return the text and the exit code."""
    began = time.monotonic()
    found = examine(prepare(options, ["true"]))
    findings = all_findings(found)
    code = 1 if problems(findings) else 0
    if as_data:
        return as_json(found, findings), code
    took = f"Examined {counted(len(found.hosts), 'host')} in {time.monotonic() - began:.1f} s.\n"
    return as_text(found, findings) + took, code


def problems(findings: Sequence[Finding]) -> List[Finding]:
    """Return the findings that are more than notes."""
    return [row for row in findings if row.level != NOTE]


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


# ---- examination ---------------------------------------------------------------------------------

Ask = Callable[[Mapping[int, Mapping[str, Any]], float], Dict[int, Any]]
"""Sends commands to hosts, and returns the answers of those that answer within a time."""


def examine(job: Job) -> Examination:
    """Start a program on each host, have them dial and measure each other, and end them."""
    probes = [HostProbe(host) for host in job.hosts]
    with ThreadPoolExecutor(max(1, len(probes))) as pool:

        def ask(asked: Mapping[int, Mapping[str, Any]], limit_s: float) -> Dict[int, Any]:
            rows = pool.map(lambda pair: probes[pair[0]].ask(limit_s, **pair[1]), asked.items())
            return {index: answer for index, answer in zip(asked, rows) if answer is not None}

        try:
            with ThreadPoolExecutor(AT_ONCE) as logins:
                list(logins.map(lambda item: item.start(), probes))
            facts = list(pool.map(lambda item: item.ask(do="facts", cwd=item.host.cwd), probes))
            found = Examination(job, [], [item.noise for item in probes], facts, {}, {}, {})
            _choose_routes(found, _listening(found, ask), ask)
            _measure_routes(found, ask)
        finally:
            list(pool.map(lambda item: item.end(), probes))
    return found._replace(problems=[item.problem for item in probes])


def _listening(found: Examination, ask: Ask) -> Dict[int, Located]:
    """Have all hosts listen; return those that do."""
    job = found.job
    places: Dict[int, Located] = {}
    common = {"do": "listen", "key": job.key.hex(), "job": job.id, "certificate": job.certificate}
    asked = {
        index: {**common, "rank": index, "iface": host.env.get("RINGCOMM_IFACE", "")}
        for index, host in enumerate(job.hosts)
    }
    for index, answer in ask(asked, ANSWER_LIMIT_S).items():
        if "problem" in answer:
            found.unheard[index] = answer["problem"]
        else:
            offers, machine = answer.get("addresses", []), answer.get("machine", "")
            places[index] = Located(index, found.hosts[index], index, 0, machine, offers)
    return places


def _choose_routes(found: Examination, places: Mapping[int, Located], ask: Ask) -> None:
    """Have all hosts dial each other, measure where there is a choice, and choose, as a job does."""
    targets = {
        index: [as_target(other) for other in places.values() if other.rank != index] for index in places
    }
    asked = {index: {"do": "probe", "targets": some, "within_s": PROBE_S} for index, some in targets.items()}
    reports = {
        index: [attempt._replace(source=index) for attempt in rows]
        for index, rows in ask(asked, PROBE_S + ANSWER_LIMIT_S).items()
    }
    routing = Routing(list(places.values()), reports)
    wanted = routing.wanted()
    while wanted:
        for index, speeds in _measured(wanted, ask).items():
            routing.measured(index, speeds)
        wanted = routing.wanted()
    found.tried.update({(one, other): routing.tried((one, other)) for one in places for other in places
                        if one < other})  # fmt: skip
    routing.leave_out(routing.unreached())
    for pair, chosen in routing.routes().items():
        found.routes[pair] = Route(chosen, dict.fromkeys((pair, pair[::-1]), 0.0))


def _measured(wanted: Mapping[int, List[Dict[str, Any]]], ask: Ask) -> Dict[int, Any]:
    asked = {index: {"do": "measure", "pairs": pairs} for index, pairs in wanted.items()}
    return ask(asked, ANSWER_LIMIT_S * max(map(len, wanted.values()), default=1))


def _measure_routes(found: Examination, ask: Ask) -> None:
    """Measure the chosen routes, in rounds in which no host occurs twice."""
    routes = found.routes
    for some in pairings(range(len(found.hosts))):
        for _ in range(MEASUREMENTS):
            slow = [routes[pair].chosen for pair in some if pair in routes and routes[pair].is_slow]
            if slow:
                _measure_once(found, slow, ask)


def _measure_once(found: Examination, chosen: Sequence[Attempt], ask: Ask) -> None:
    wanted: Dict[int, List[Dict[str, Any]]] = {}
    for item in chosen:
        wire = {"address": item.address, "port": item.port, "iface": item.local_iface}
        wanted[item.source] = [{"rank": item.target, "wires": [wire]}]
    for source, rows in _measured(wanted, ask).items():
        for row in rows:
            there = (source, row["rank"])
            speeds = found.routes[min(there), max(there)].speeds
            for way, speed in ((there, row["there_mb_per_s"]), (there[::-1], row["back_mb_per_s"])):
                speeds[way] = max(speed, speeds[way])


# ---- findings: the facts as problems with remedies; each check is a function that yields them -----------

BAD, SLOW, NOTE = "bad", "slow", "note"
LEVELS = (BAD, SLOW, NOTE)
CHECKS = ("login", "software", "addresses", "network", "links", "cpu", "memory", "limits")
"""The columns of the report."""
MEMORY_BYTES, DISK_BYTES, SHM_BYTES = 500 << 20, 200 << 20, 64 << 20
FILES_SPARE, FILES_PER_RANK = 64, 14


class Finding(NamedTuple):
    """One problem, with the numbers in its text and the command in its remedy."""

    level: str  # jobs fail or hang (bad), or are slower than possible (slow); or it is a note (exit code 0)
    check: str  # one of CHECKS
    hosts: Tuple[int, ...]  # indices
    text: str
    remedy: str = ""


def all_findings(found: Examination) -> List[Finding]:
    """Return every problem, in the order of :data:`CHECKS`, in each the worst first."""
    rows: List[Finding] = []
    for index, facts in enumerate(found.facts):
        rows += _login(found, index)
        for check, find in _OF_HOSTS if facts is not None else ():
            for level, text, remedy in find(found, index, facts or {}):
                rows.append(Finding(level, check, (index,), text, remedy))
    for common in (_versions, _twins, _reach, _links):
        rows += common(found)
    return sorted(rows, key=lambda row: (CHECKS.index(row.check), LEVELS.index(row.level), row.hosts))


# Of single hosts: level, text, remedy.

Row = Tuple[str, str, str]


def _is_usable(name: str) -> bool:
    """Return whether an interface may connect hosts; other hosts usually have the same ones of containers."""
    return not name.startswith(("docker", "br-", "virbr", "veth", "lxc", "cni"))


def _login(found: Examination, index: int) -> Iterator[Finding]:
    name, noise = found.hosts[index], found.noises[index]
    if found.problems[index]:
        text = found.problems[index]
        yield Finding(BAD, "login", (index,), text[len(name) + 2 :] if text.startswith(f"{name}: ") else text)
    elif noise:
        first = noise.strip().partition("\n")[0][:60]
        yield Finding(
            SLOW, "login", (index,),
            f"its login shell prints {len(noise)} characters before a program runs ({quoted(first)})",
            "print in interactive shells only: begin ~/.bashrc with `case $- in *i*) ;; *) return;; esac`",
        )  # fmt: skip


def _software(found: Examination, index: int, facts: Dict[str, Any]) -> Iterator[Row]:
    gets_files = found.job.hosts[index].gets_code and found.job.tree is not None
    if not facts["cwd_exists"] and not gets_files:
        remedy = f"make it, name another with --cwd {found.hosts[index]}=PATH, or send the code with --ship"
        yield BAD, "the directory in which ranks would run does not exist", remedy
    if "numpy" not in facts["packages"] and not found.job.provision:
        python = facts["executable"]
        yield BAD, f"{python} has no numpy", f"start with --provision, or: {python} -m pip install numpy"


def _addresses(found: Examination, index: int, facts: Dict[str, Any]) -> Iterator[Row]:
    if index in found.unheard:
        yield BAD, f"no route can be looked for: {found.unheard[index]}", ""
    real = [iface for iface in facts["interfaces"] if _is_usable(iface["name"])]
    networks: Dict[str, List[str]] = defaultdict(list)
    for iface in real:
        for address, bits in iface["addresses"]:
            network = str(ipaddress.ip_network(f"{address}/{bits}", strict=False))
            if ":" not in address and iface["name"] not in networks[network]:
                networks[network].append(iface["name"])
    for network, names in networks.items():
        if len(names) > 1:
            yield (
                SLOW, f"{' and '.join(names)} are both in {network}",
                f"take one of them: --iface {found.hosts[index]}={names[0]}; or sysctl -w "
                "net.ipv4.conf.all.arp_filter=1 there, so that answers leave by the right one",
            )  # fmt: skip
    if not any(iface["addresses"] for iface in real):
        yield BAD, "no network interface has an address", "look at `ip address` there"


def _cpu(found: Examination, index: int, facts: Dict[str, Any]) -> Iterator[Row]:
    cpu, ranks, name = facts["cpu"], found.job.hosts[index].planned.used, found.hosts[index]
    cores = cpu["cores"] or 1
    if cpu["quota"] is not None and cpu["quota"] < cores:
        remedy = "raise the quota of the container (docker run --cpus, CPUQuota= of the service)"
        yield SLOW, f"its control group may use {cpu['quota']:g} of {cores:g} cores", remedy
    if cores < cpu["all_cores"]:
        remedy = "look at `taskset -p 1` there, and at the container's --cpuset-cpus"
        yield SLOW, f"its programs may use {cores:g} of {cpu['all_cores']} cores", remedy
    if ranks > cores:
        text = f"{ranks} ranks on {cores:g} core{'' if cores == 1 else 's'}"
        yield SLOW, text, f"use as many ranks as cores: -H {name}:{cores:g}"
    if cpu["power_mode"] not in (None, "MAXN", "MAXN_SUPER"):
        yield SLOW, f"its power mode is {cpu['power_mode']}", "sudo nvpmodel -m 0 && sudo jetson_clocks"


def _memory(found: Examination, index: int, facts: Dict[str, Any]) -> Iterator[Row]:
    free = facts["memory_bytes"]
    if free is not None and free < MEMORY_BYTES:
        remedy = "end other programs; a rank with PyTorch needs some 400 MB before its model"
        yield BAD, f"{free / 1e6:.0f} MB of memory are free", remedy
    for path, space in facts["disks"].items():
        if space is not None and space < (SHM_BYTES if path == "/dev/shm" else DISK_BYTES):
            remedy = "remove files there" if path != "/dev/shm" else "enlarge it (docker run --shm-size=1g)"
            yield BAD, f"{path} has {space / 1e6:.0f} MB free", remedy


def _limits(found: Examination, index: int, facts: Dict[str, Any]) -> Iterator[Row]:
    files, ranks = facts["files"], sum(host.planned.used for host in found.job.hosts)
    needed = FILES_SPARE + FILES_PER_RANK * ranks
    if 0 <= files < needed:
        remedy = "ulimit -n 4096, or `* - nofile 4096` in /etc/security/limits.conf"
        yield BAD, f"a process may open {files} files; {ranks} ranks need some {needed}", remedy


_OF_HOSTS = (
    ("software", _software), ("addresses", _addresses), ("cpu", _cpu), ("memory", _memory),
    ("limits", _limits),
)  # fmt: skip


def _names(found: Examination, indices: Any) -> str:
    return ", ".join(found.hosts[index] for index in indices)


def _versions(found: Examination) -> Iterator[Finding]:
    for name in ("numpy", "torch", "tensorflow", "keras", "jax", "mlx", "mxnet"):
        versions = {
            index: facts["packages"].get(name) for index, facts in enumerate(found.facts) if facts is not None
        }
        have = {index: version for index, version in versions.items() if version}
        lacking = tuple(index for index in versions if index not in have)
        if have and lacking and name != "numpy":
            text = f"{name} is not there, but on {_names(found, have)} it is"
            yield Finding(SLOW, "software", lacking, text, f"install {name} there if the program uses it")
        numbered = {index: version for index, version in have.items() if version != "?"}
        if len({tuple(version.split("+")[0].split(".")[:2]) for version in numbered.values()}) > 1:
            rows = ", ".join(f"{found.hosts[index]} {version}" for index, version in numbered.items())
            yield Finding(
                SLOW, "software", tuple(numbered), f"different versions of {name}: {rows}",
                "install the same version everywhere: results may differ, and saved models may not load",
            )  # fmt: skip


def _twins(found: Examination) -> Iterator[Finding]:
    """Find two hosts with the same machine id, hardware address or address."""
    seen: Dict[Tuple[str, str], List[int]] = defaultdict(list)
    for index, facts in enumerate(found.facts):
        usable = [iface for iface in (facts or {}).get("interfaces", ()) if _is_usable(iface["name"])]
        values = [("machine id", (facts or {}).get("machine_id"))]
        values += [("hardware address", iface["mac"]) for iface in usable]
        values += [("address", address) for iface in usable for address, _ in iface["addresses"]]
        for kind, value in dict.fromkeys(values):
            if (value or "").strip("0:"):
                seen[kind, str(value)].append(index)
    alike: Dict[Tuple[int, ...], List[Tuple[str, str]]] = defaultdict(list)
    for what, indices in seen.items():
        if len(indices) > 1:
            alike[tuple(indices)].append(what)
    for hosts, some in alike.items():
        if {kind for kind, _ in some} == {"machine id", "hardware address", "address"}:
            called = (found.facts[hosts[0]] or {})["hostname"]
            names = " ".join(found.hosts[index] for index in hosts)
            yield Finding(
                BAD, "addresses", hosts,
                f"{_names(found, hosts)} are one machine, which calls itself {called}",
                "name it once, or correct the names' addresses in /etc/hosts or ~/.ssh/config: getent hosts "
                f"{names}",
            )  # fmt: skip
            continue
        for kind, value in some:
            level, remedy = (SLOW, _IMAGES) if kind == "machine id" else (BAD, _OWN)
            text = f"{_names(found, hosts)} have the same {kind} {value}"
            yield Finding(level, "addresses", hosts, text, remedy)


_OWN = "give each host its own: connections reach one or the other by chance"
_IMAGES = (
    "images of one card: on all but one of them `sudo rm /etc/machine-id && sudo systemd-machine-id-setup`, "
    "then reboot (DHCP may give both the same address until then)"
)


def _reach(found: Examination) -> Iterator[Finding]:
    local = next((host.index for host in found.job.hosts if host.is_local), -1)
    for pair, tried in sorted(found.tried.items()):
        open_ways = {item.source for item in tried if not item.why}
        for source, target in (pair, pair[::-1]):
            if source in open_ways:
                continue
            rows = [item for item in tried if item.source == source]
            likely = [row for row in rows if row.kind != VIRTUAL and not row.address.startswith("fe80:")]
            tries = dict.fromkeys(
                f"{row.address} ({row.remote_iface}): {quoted(row.why)}" for row in likely or rows
            )
            text = f"{found.hosts[source]} does not reach {found.hosts[target]}: "
            text += ", ".join(tries) or "no address to dial"
            level, remedy = BAD, _opening(found, target, rows)
            if pair in found.routes and target == local:
                text += "; a job's ranks there must, for its rendezvous"
            elif pair in found.routes:
                level, remedy = NOTE, ""
                text += f"; {found.hosts[target]} reaches {found.hosts[source]}, which is enough for a job"
            yield Finding(level, "network", (source, target), text, remedy)


def _opening(found: Examination, target: int, rows: Sequence[Attempt]) -> str:
    """Return the remedy for a host that does not answer."""
    blocked = [row for row in rows if row.too_slow or "no answer" in row.why or "refused" in row.why]
    for row in sorted(blocked, key=lambda item: PREFERENCE[item.kind]):
        network = found.common_network(row.source, row.target, row.address)
        if network is not None:
            allow = f"sudo ufw allow from {network}"
            return f"open the firewall of {found.hosts[target]} for the other hosts: {allow}"
    if any(_is_usable(row.remote_iface) for row in blocked):
        return (
            "they have no network in common: check the routes between their networks, and open the firewall "
            f"of {found.hosts[target]} for the others' addresses: sudo ufw allow from ADDRESS"
        )
    return "connect both to one network: check cables, switch and Wi-Fi, and the addresses in `ip address`"


def _links(found: Examination) -> Iterator[Finding]:
    for pair, route in sorted(found.routes.items()):
        for source, target in (pair, pair[::-1]):
            speed, by = route.speeds[source, target], f"{route.iface(source)} to {route.iface(target)}"
            names = f"{found.hosts[source]} to {found.hosts[target]} by {by}"
            if not speed:
                yield Finding(
                    BAD, "links", (source, target), f"{names}: short messages arrive, a stream does not",
                    "compare the MTUs of all interfaces and of the switch; try: ping -M do -s 1472 HOST",
                )  # fmt: skip
            elif speed < SLOW_MB_PER_S:
                yield Finding(
                    SLOW, "links", (source, target), f"{names}: {speed:.1f} MB/s",
                    "look for a bad cable, a weak Wi-Fi or other traffic; use a wire of 1 Gbit/s, or "
                    "compress gradients",
                )  # fmt: skip


# ---- the report as text and as JSON ----------------------------------------------------------------


def as_text(found: Examination, findings: Sequence[Finding]) -> str:
    """Return a line for each host, the table of links, and the problems with their remedies."""
    wide = max(map(len, found.hosts))
    lines = [f"{'':{wide}}  " + "  ".join(f"{check:9}" for check in CHECKS).rstrip()]
    for index, name in enumerate(found.hosts):
        marks = [_mark(found, findings, index, check) for check in CHECKS]
        lines.append(f"{name:{wide}}  " + "  ".join(f"{mark:9}" for mark in marks).rstrip())
    if found.tried:
        lines += ["", *_table_of_links(found)]
    lines.append("")
    for finding in findings:
        lines += [*_wrapped(found, finding), ""]
    count, notes = len(problems(findings)), len(findings) - len(problems(findings))
    text = counted(count, "problem") if count else "No problem found"
    text += f", {counted(notes, 'note')}" if notes else ""
    return "\n".join([*lines, f"{text}."]) + "\n"


def _mark(found: Examination, findings: Sequence[Finding], index: int, check: str) -> str:
    levels = {row.level for row in problems(findings) if row.check == check and index in row.hosts}
    return min(levels, default="-" if found.problems[index] else "ok", key=LEVELS.index)


def _table_of_links(found: Examination) -> List[str]:
    """Return a line for each pair of hosts, with the interfaces of a job and the speed each way."""
    rows: List[Tuple[str, ...]] = [("link", "by", "there", "back")]
    for pair in sorted(found.tried):
        route, names = found.routes.get(pair), " - ".join(found.hosts[host] for host in pair)
        if route is None:
            rows.append((names, "no connection", "", ""))
        else:
            by = " - ".join(route.iface(host) for host in pair)
            rows.append((names, by, _rate(route, pair), _rate(route, pair[::-1])))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(text.ljust(wide) for text, wide in zip(row, widths)).rstrip() for row in rows]


def _rate(route: Route, way: Pair) -> str:
    speed = route.speeds[way]
    return f"{speed:.{0 if speed >= 10 else 1}f} MB/s" if speed else "no stream"


def _wrapped(found: Examination, finding: Finding) -> List[str]:
    names = ", ".join(found.hosts[index] for index in finding.hosts)
    text = f"{finding.level}: {names}: {finding.text}"
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="      ", break_on_hyphens=False)
    remedy = f"      → {finding.remedy}" if finding.remedy else ""
    return lines + textwrap.wrap(remedy, WIDTH, subsequent_indent="        ", break_on_hyphens=False)


def as_json(found: Examination, findings: Sequence[Finding]) -> str:
    """Return the report for programs."""
    rows = [{**row._asdict(), "hosts": [found.hosts[index] for index in row.hosts]} for row in findings]
    content = {
        "hosts": [
            {"name": name, "problem": problem, "facts": facts}
            for name, problem, facts in zip(found.hosts, found.problems, found.facts)
        ],
        "links": [
            {
                "from": found.hosts[source], "to": found.hosts[target], "from_iface": route.iface(source),
                "to_iface": route.iface(target), "bytes_per_s": 1e6 * route.speeds[source, target],
            }
            for pair, route in sorted(found.routes.items())
            for source, target in (pair, pair[::-1])
        ],
        "problems": [row for row in rows if row["level"] != NOTE],
        "notes": [row for row in rows if row["level"] == NOTE],
    }  # fmt: skip
    return json.dumps(content, indent=2) + "\n"
