"""Problems between hosts, and all problems of an examination. Pure.

``ringrun doctor`` collects facts about every host and the network between them
(:class:`~.hosts.Examination`); here they become findings: what is wrong, how bad that is, and what to do.
Problems of one host alone are in :mod:`.host_findings`. Hosts are numbered as in ``Examination.hosts``. Each
check is a function that yields findings.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from .finding import BAD, CHECKS, SLOW, Finding, is_usable
from .host_findings import host_findings
from .hosts import Dialled, Examination

SKEW_S = 2.0
"""Clocks that differ more from the first host's are reported."""
JITTER = 10.0
JITTER_MS = 5.0
"""Round trips whose slowest are this many times the median and this long point to power saving."""
UNEQUAL = 4.0
"""A direction that is this many times slower than the other one is reported."""
CLAIMED_SHARE = 0.5
"""So is a link that is slower than this part of what both interfaces claim, and than 4 * SLOW_BYTES_PER_S."""
SLOW_BYTES_PER_S = 30e6
"""And any link that is slower than this."""


def all_findings(found: Examination) -> List[Finding]:
    """Every problem, in the order of :data:`~.finding.CHECKS`; in each, first those that make jobs fail."""
    rows: List[Finding] = []
    for index in range(len(found.hosts)):
        rows += host_findings(found, index)
    for check in (_common_software, _twins, _reach, _links, _unsteady, _clocks):
        rows += check(found)
    return sorted(rows, key=lambda row: (CHECKS.index(row.check), row.level, row.hosts))


def _common_software(found: Examination) -> Iterator[Finding]:
    for name in ("numpy", "torch", "tensorflow", "keras", "jax", "mxnet"):
        versions = {
            index: facts["packages"].get(name) for index, facts in enumerate(found.facts) if facts is not None
        }
        have = {index: version for index, version in versions.items() if version}
        if not have or name == "numpy" and len(set(map(_minor, have.values()))) == 1:
            continue
        lacking = tuple(index for index in versions if index not in have)
        if lacking and name != "numpy":
            yield Finding(
                SLOW, "software", lacking, f"{name} is not there, but on {_names(found, have)} it is",
                f"install {name} there if the program uses it",
            )  # fmt: skip
        if len(set(map(_minor, have.values()))) > 1:
            rows = ", ".join(f"{found.hosts[index]} {version}" for index, version in have.items())
            yield Finding(
                SLOW, "software", tuple(have), f"different versions of {name}: {rows}",
                "install the same version everywhere: results may differ, and saved models may not load",
            )  # fmt: skip


def _minor(version: str) -> Tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _interfaces(found: Examination, index: int) -> List[Dict[str, Any]]:
    facts = found.facts[index]
    return [] if facts is None else list(facts["interfaces"])


def _names(found: Examination, indices: Any) -> str:
    return ", ".join(found.hosts[index] for index in indices)


def _twins(found: Examination) -> Iterator[Finding]:
    """Two hosts with the same machine id, hardware address or address."""
    seen: Dict[Tuple[str, str], List[int]] = defaultdict(list)
    for index, facts in enumerate(found.facts):
        if facts is None:
            continue
        if facts["machine_id"]:
            seen["machine id", facts["machine_id"]].append(index)
        for iface in facts["interfaces"]:
            if is_usable(iface):
                if iface["mac"] and iface["mac"] != "00:00:00:00:00:00":
                    seen["hardware address", iface["mac"]].append(index)
                for address, _ in iface["addresses"]:
                    seen["address", address].append(index)
    alike: Dict[Tuple[int, ...], List[Tuple[str, str]]] = defaultdict(list)
    for what, indices in seen.items():
        if len(set(indices)) > 1:
            alike[tuple(sorted(set(indices)))].append(what)
    for hosts, some in alike.items():
        if {kind for kind, _ in some} == {"machine id", "hardware address", "address"}:
            yield _same_machine(found, hosts)
        else:
            for kind, value in some:
                yield _twin(found, kind, value, hosts)


def _same_machine(found: Examination, indices: Tuple[int, ...]) -> Finding:
    facts = found.facts[indices[0]] or {}
    names = " ".join(found.hosts[index] for index in indices)
    return Finding(
        BAD, "addresses", indices,
        f"{_names(found, indices)} are one machine, which calls itself {facts['hostname']}",
        f"name it once, or correct the names' addresses in /etc/hosts or ~/.ssh/config: getent hosts {names}",
    )  # fmt: skip


def _twin(found: Examination, kind: str, value: str, indices: Tuple[int, ...]) -> Finding:
    text = f"{_names(found, indices)} have the same {kind} {value}"
    if kind == "machine id":
        remedy = (
            "images of one card: on all but one of them `sudo rm /etc/machine-id && "
            "sudo systemd-machine-id-setup`, then reboot (DHCP may give both the same address until then)"
        )
        return Finding(SLOW, "addresses", indices, text, remedy)
    remedy = "give each host its own: connections reach one or the other by chance"
    return Finding(BAD, "addresses", indices, text, remedy)


def _reach(found: Examination) -> Iterator[Finding]:
    rows: Dict[Tuple[int, int], List[Dialled]] = defaultdict(list)
    for row in found.dialled:
        rows[row.source, row.target].append(row)
    reached = {
        pair: any(row.result.get("answered") == row.target for row in some) for pair, some in rows.items()
    }
    for (source, target), some in sorted(rows.items()):
        for row in some:
            answered = row.result.get("answered")
            if answered is not None and answered != target and not row.iface.startswith("docker"):
                yield Finding(
                    SLOW, "addresses", (source, target),
                    f"{row.address} of {found.hosts[target]} ({row.iface}) leads {found.hosts[source]} to "
                    f"{found.hosts[answered]}",
                    f"ringcomm does not use it; exclude it with --iface {found.hosts[target]}='!{row.iface}'",
                )  # fmt: skip
        if not reached[source, target]:
            back = reached.get((target, source), False)
            yield Finding(
                BAD, "network", (source, target), _unreached(found, some, back), _opening(some, back)
            )
        else:
            yield from _datagrams(found, some)


def _unreached(found: Examination, rows: Sequence[Dialled], back: bool) -> str:
    source, target = found.hosts[rows[0].source], found.hosts[rows[0].target]
    tries = ", ".join(f"{row.address} ({row.iface}): {_error(row.result)}" for row in rows)
    other = f"; {target} reaches {source}" if back else ""
    return f"{source} does not reach {target}: {tries}{other}"


def _error(result: Dict[str, Any]) -> str:
    known = {
        "timeout": "no answer", "ECONNREFUSED": "refused",
        "EHOSTUNREACH": "no route", "ENETUNREACH": "no network",
    }  # fmt: skip
    name = str(result.get("error", "another host answers"))
    return known.get(name, name)


def _opening(rows: Sequence[Dialled], back: bool) -> str:
    refused = any(row.result.get("error") in ("ECONNREFUSED", "timeout") for row in rows)
    address = next((row.address for row in rows if ":" not in row.address), "")
    network = f"{address.rpartition('.')[0]}.0/24" if address else "the peers' network"
    if refused or back:
        return f"open its firewall for the other hosts: sudo ufw allow from {network}"
    return "connect both to one network: check cables, switch and Wi-Fi, and the addresses in `ip address`"


def _datagrams(found: Examination, rows: Sequence[Dialled]) -> Iterator[Finding]:
    """Paths that lose packets of the interface's MTU: ``datagrams`` says whether a small and a full-sized one
    came back, with fragmentation forbidden."""
    for row in rows:
        if row.result.get("datagrams") == [True, False]:
            source, target = found.hosts[row.source], found.hosts[row.target]
            ifaces = _interfaces(found, row.target)
            mtu = next((item["mtu"] for item in ifaces if item["name"] == row.iface), None)
            yield Finding(
                BAD, "network", (row.source, row.target),
                f"packets of {target}'s size ({mtu} bytes, {row.iface}) from {source} do not arrive at "
                f"{row.address}, small ones do: the MTU differs along the way",
                f"set the same MTU on all hosts and the switch: sudo ip link set {row.iface} mtu 1500",
            )  # fmt: skip


def _links(found: Examination) -> Iterator[Finding]:
    """Slow, unequal and unsteady links."""
    for (source, target), speed in sorted(found.speeds.items()):
        pair = f"{found.hosts[source]} to {found.hosts[target]}"
        back = found.speeds.get((target, source))
        if speed is None:
            yield Finding(
                BAD, "links", (source, target), f"{pair}: short messages arrive, a stream does not",
                "compare the MTUs of all interfaces and of the switch; try: ping -M do -s 1472 HOST",
            )  # fmt: skip
            continue
        rate = f"{pair}: {speed / 1e6:.1f} MB/s"
        claimed = _claimed(found, source, target)
        if back and speed * UNEQUAL < back:
            yield Finding(
                SLOW, "links", (source, target), f"{rate}, the other direction {back / 1e6:.1f}",
                "a bad cable, a duplex mismatch or a weak Wi-Fi sender: try another cable or place; ethtool",
            )  # fmt: skip
        elif (
            claimed is not None and speed * 8 < CLAIMED_SHARE * claimed * 1e6 and speed < SLOW_BYTES_PER_S * 4
        ):
            yield Finding(
                SLOW, "links", (source, target), f"{rate}, but both interfaces claim {claimed} Mbit/s",
                "look for other traffic, a slower switch port or a bad cable in between",
            )  # fmt: skip
        elif speed < SLOW_BYTES_PER_S:
            yield Finding(
                SLOW, "links", (source, target), rate,
                "use a wire of 1 Gbit/s; where that cannot be, compress gradients",
            )  # fmt: skip


def _claimed(found: Examination, source: int, target: int) -> Optional[int]:
    """The lower of the speeds that the two hosts' interfaces claim, in Mbit/s."""
    pair = (source, target)
    chosen = [row for row in found.dialled if (row.source, row.target) == pair and "rtt_ms" in row.result]
    if not chosen:
        return None
    row = min(chosen, key=lambda item: item.result["rtt_ms"][0])
    claims = []
    for index, address in ((source, row.result["source"]), (target, row.address)):
        for iface in _interfaces(found, index):
            speed = iface["speed_mbit"] or 0
            if any(address == own for own, _ in iface["addresses"]) and speed > 0 and not iface["virtual"]:
                claims.append(int(speed))
    return min(claims) if len(claims) == 2 else None


def _unsteady(found: Examination) -> Iterator[Finding]:
    told: Set[int] = set()
    for index in range(len(found.hosts)):
        for iface in _interfaces(found, index):
            if iface["power_save"]:
                told.add(index)
                yield Finding(
                    SLOW, "links", (index,), f"{iface['name']} is Wi-Fi that saves power",
                    f"sudo iw dev {iface['name']} set power_save off (for good: wifi.powersave = 2 in "
                    "/etc/NetworkManager/conf.d/)",
                )  # fmt: skip
    for row in found.dialled:
        trips = row.result.get("rtt_ms")
        if trips and trips[-1] > JITTER_MS and trips[-1] > JITTER * median(trips):
            names = f"{found.hosts[row.source]} to {found.hosts[row.target]}"
            ends = {row.source, row.target}
            wireless = any(iface["wireless"] for end in ends for iface in _interfaces(found, end))
            if wireless and not ends & told:
                yield Finding(
                    SLOW, "links", (row.source, row.target),
                    f"{names}: a round trip takes {median(trips):.1f} ms, but sometimes {trips[-1]:.0f}",
                    "switch off the power saving of Wi-Fi: sudo iw dev wlan0 set power_save off",
                )  # fmt: skip


def _clocks(found: Examination) -> Iterator[Finding]:
    skews: Dict[int, List[float]] = defaultdict(list)
    for row in found.dialled:
        if row.source == 0 and "skew_s" in row.result and row.result.get("answered") == row.target:
            skews[row.target].append(row.result["skew_s"])
    for index, values in skews.items():
        skew = median(values)
        side = "ahead of" if skew > 0 else "behind"
        if abs(skew) > SKEW_S:
            yield Finding(
                SLOW, "software", (index,),
                f"its clock is {abs(skew):.0f} s {side} that of {found.hosts[0]}",
                "sudo timedatectl set-ntp true (logs are hard to compare; certificates may not be valid yet)",
            )  # fmt: skip
