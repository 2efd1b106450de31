"""Problems between hosts, and all problems of an examination. Pure.

``ringrun doctor`` collects facts about every host and the network between them
(:class:`~.network.Examination`); here they become findings: the problem, its level, and the remedy. Problems
of one host alone are in :mod:`.host_findings`. Hosts are numbered as in ``Examination.hosts``. Each check is
a function that yields findings. Only links on a job's routes are judged.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from ringcomm.transport.kinds import PREFERENCE, VIRTUAL
from ringcomm.transport.routes import Attempt

from ..plan.reaching import quoted
from .finding import BAD, CHECKS, LEVELS, NOTE, SLOW, Finding, is_usable
from .host_findings import host_findings
from .network import ENOUGH_MB_PER_S, Examination, Route

SKEW_S = 2.0
"""Clocks that differ more from the first host's are reported."""
UNEQUAL = 4.0
"""A direction that is this many times slower than the other one is reported. The other one counts only up to
:data:`.network.ENOUGH_MB_PER_S`: above, processors decide."""
CLAIMED_SHARE = 0.5
"""A link slower than this part of both interfaces' claims, and than what is enough, is reported."""
SLOW_BYTES_PER_S = 30e6
"""Any slower link is reported."""
_ENOUGH = ENOUGH_MB_PER_S * 1e6


def all_findings(found: Examination) -> List[Finding]:
    """Return every problem, in the order of :data:`~.finding.CHECKS`, in each the worst first."""
    rows: List[Finding] = []
    for index in range(len(found.hosts)):
        rows += host_findings(found, index)
    for check in (_common_software, _twins, _unheard, _reach, _links, _power_saving, _clocks):
        rows += check(found)
    return sorted(rows, key=lambda row: (CHECKS.index(row.check), LEVELS.index(row.level), row.hosts))


def _common_software(found: Examination) -> Iterator[Finding]:
    for name in ("numpy", "torch", "tensorflow", "keras", "jax", "mlx", "mxnet"):
        versions = {
            index: facts["packages"].get(name) for index, facts in enumerate(found.facts) if facts is not None
        }
        have = {index: version for index, version in versions.items() if version}
        lacking = tuple(index for index in versions if index not in have)
        if have and lacking and name != "numpy":
            yield Finding(
                SLOW, "software", lacking, f"{name} is not there, but on {_names(found, have)} it is",
                f"install {name} there if the program uses it",
            )  # fmt: skip
        numbered = {index: version for index, version in have.items() if version != "?"}
        if len(set(map(_minor, numbered.values()))) > 1:
            rows = ", ".join(f"{found.hosts[index]} {version}" for index, version in numbered.items())
            yield Finding(
                SLOW, "software", tuple(numbered), f"different versions of {name}: {rows}",
                "install the same version everywhere: results may differ, and saved models may not load",
            )  # fmt: skip


def _minor(version: str) -> Tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _names(found: Examination, indices: Any) -> str:
    return ", ".join(found.hosts[index] for index in indices)


def _twins(found: Examination) -> Iterator[Finding]:
    """Find two hosts with the same machine id, hardware address or address."""
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


def _unheard(found: Examination) -> Iterator[Finding]:
    for index, problem in found.unheard.items():
        yield Finding(BAD, "addresses", (index,), f"no route can be looked for: {problem}", "")


def _reach(found: Examination) -> Iterator[Finding]:
    for pair, tried in sorted(found.tried.items()):
        open_ways = {item.source for item in tried if not item.why}
        for source, target in (pair, pair[::-1]):
            rows = [item for item in tried if item.source == source]
            if source in open_ways:
                continue
            text = _unreached(found, source, target, rows)
            if pair not in found.routes:
                yield Finding(BAD, "network", (source, target), text, _opening(found, target, rows))
            elif target == found.local:
                yield Finding(
                    BAD, "network", (source, target), f"{text}; a job's ranks there must, for its rendezvous",
                    _opening(found, target, rows),
                )  # fmt: skip
            else:
                yield Finding(
                    NOTE, "network", (source, target),
                    f"{text}; {found.hosts[target]} reaches {found.hosts[source]}, which is enough for a job",
                    "",
                )  # fmt: skip


def _unreached(found: Examination, source: int, target: int, rows: Sequence[Attempt]) -> str:
    likely = [row for row in rows if row.kind != VIRTUAL and not row.address.startswith("fe80:")] or rows
    tries = ", ".join(
        dict.fromkeys(f"{row.address} ({row.remote_iface}): {quoted(row.why)}" for row in likely)
    )
    return f"{found.hosts[source]} does not reach {found.hosts[target]}: {tries or 'no address to dial'}"


def _opening(found: Examination, target: int, rows: Sequence[Attempt]) -> str:
    """Return the remedy for a host that does not answer."""
    for row in sorted(rows, key=lambda item: PREFERENCE[item.kind]):
        common = found.common_network(row.source, row.target, row.address)
        if common is not None and _is_firewall(row):
            return f"open the firewall of {found.hosts[target]} for the other hosts: {_ufw(common[1])}"
    if any(_is_firewall(row) and is_usable({"name": row.remote_iface}) for row in rows):
        return (
            "they have no network in common: check the routes between their networks, and open the firewall "
            f"of {found.hosts[target]} for the others' addresses: sudo ufw allow from ADDRESS"
        )
    return "connect both to one network: check cables, switch and Wi-Fi, and the addresses in `ip address`"


def _is_firewall(row: Attempt) -> bool:
    """Return whether an attempt failed as at a firewall."""
    return row.too_slow or "no answer" in row.why or "refused" in row.why


def _ufw(network: str) -> str:
    return f"sudo ufw allow from {network}"


def _links(found: Examination) -> Iterator[Finding]:
    """Find slow and unequal links."""
    for pair, route in sorted(found.routes.items()):
        for source, target in (pair, pair[::-1]):
            finding = _link(found, route, source, target)
            if finding is not None:
                yield finding


def _link(found: Examination, route: Route, source: int, target: int) -> Optional[Finding]:
    """Return the problem of one direction of a link, or None."""
    by = f"{route.iface(source)} to {route.iface(target)}"
    names = f"{found.hosts[source]} to {found.hosts[target]} by {by}"
    speed, back = route.speeds[source, target], route.speeds[target, source]
    if speed is None:
        return Finding(
            BAD, "links", (source, target), f"{names}: short messages arrive, a stream does not",
            "compare the MTUs of all interfaces and of the switch; try: ping -M do -s 1472 HOST",
        )  # fmt: skip
    rate, claimed = f"{names}: {speed / 1e6:.1f} MB/s", _claimed(found, route)
    if back is not None and speed * UNEQUAL < min(back, _ENOUGH):
        return Finding(
            SLOW, "links", (source, target), f"{rate}, the other direction {back / 1e6:.1f}",
            "a bad cable, a duplex mismatch or a weak Wi-Fi sender: try another cable or place; ethtool "
            f"{route.iface(source)}",
        )  # fmt: skip
    if claimed is not None and speed * 8 < CLAIMED_SHARE * claimed * 1e6 and speed < _ENOUGH:
        return Finding(
            SLOW, "links", (source, target), f"{rate}, but both interfaces claim {claimed} Mbit/s",
            "look for other traffic, a slower switch port or a bad cable in between",
        )  # fmt: skip
    if speed < SLOW_BYTES_PER_S:
        return Finding(
            SLOW, "links", (source, target), rate,
            "use a wire of 1 Gbit/s; where that cannot be, compress gradients",
        )  # fmt: skip
    return None


def _claimed(found: Examination, route: Route) -> Optional[int]:
    """Return the lower of the speeds that the route's interfaces claim, in Mbit/s."""
    claims = []
    for host in (route.chosen.source, route.chosen.target):
        iface = found.interface(host, route.iface(host))
        if iface and (iface["speed_mbit"] or 0) > 0 and not iface["virtual"]:
            claims.append(int(iface["speed_mbit"]))
    return min(claims) if len(claims) == 2 else None


def _power_saving(found: Examination) -> Iterator[Finding]:
    used = {(host, route.iface(host)) for pair, route in found.routes.items() for host in pair}
    for index in range(len(found.hosts)):
        for iface in found.interfaces(index):
            if iface["power_save"]:
                yield Finding(
                    SLOW if (index, iface["name"]) in used else NOTE, "links", (index,),
                    f"{iface['name']} is Wi-Fi that saves power",
                    f"sudo iw dev {iface['name']} set power_save off (for good: wifi.powersave = 2 in "
                    "/etc/NetworkManager/conf.d/)",
                )  # fmt: skip


def _clocks(found: Examination) -> Iterator[Finding]:
    for index, (ahead_s, error_s) in found.ahead_s.items():
        first_s, first_error_s = found.ahead_s.get(0, (ahead_s, 0.0))
        skew_s = ahead_s - first_s
        side = "ahead of" if skew_s > 0 else "behind"
        if abs(skew_s) > SKEW_S + error_s + first_error_s:
            yield Finding(
                SLOW, "software", (index,),
                f"its clock is {abs(skew_s):.0f} s {side} that of {found.hosts[0]}",
                "sudo timedatectl set-ntp true (logs are hard to compare; certificates may not be valid yet)",
            )  # fmt: skip
