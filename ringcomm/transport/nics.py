"""This machine's network addresses, their kinds (wired, wireless, virtual), and which the user allows. And
the choice of the addresses between the ranks of two hosts, which is pure.

Nothing here resolves the machine's own name: Debian maps it to 127.0.1.1, and other systems to something
else. Addresses come from the interfaces themselves.

The name decides the kind of an interface where there is no better information. On Linux ``/sys`` has more: it
marks wireless interfaces and tunnels whatever their names, and a bridge has the kind of its members. A bridge
whose members only lead to containers or virtual machines stays undecided, because a lab's switch looks like
that as well as ``docker0``; there the bridge's own name decides.

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

import array
import fnmatch
import hashlib
import ipaddress
import logging
import os
import re
import secrets
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..configuration.membership import is_loopback
from ..errors import ConfigError, ProtocolError

logger = logging.getLogger(__name__)

WIRED, WIRELESS, VIRTUAL, LOOPBACK, LOCAL = "wired", "wireless", "virtual", "loopback", "local"

PREFERENCE = {WIRED: 0, WIRELESS: 1, VIRTUAL: 2}
"""Lower is better. Wired at one end and wireless at the other counts as wireless."""

_VIRTUAL_NAMES = (
    "docker*", "br-*", "veth*", "virbr*", "vmnet*", "vboxnet*", "vEthernet*", "tun*", "tap*", "utun*",
    "tailscale*", "wg*", "zt*", "cni*", "flannel*", "cali*", "cilium*", "kube*", "lxc*", "lxdbr*", "podman*",
    "nerdctl*", "dummy*", "ifb*", "sit*", "gre*", "ip6tnl*", "awdl*", "llw*", "bridge*", "l4tbr*", "usb*",
    "rndis*",
)  # fmt: skip
"""Names that container engines, virtual machines and VPNs give to their interfaces, and the USB
device-mode ones that every Jetson brings up with the same address. They are used only when nothing
else connects two hosts, or nothing nearly as fast, so a wrong guess costs preference, not connectivity."""

_WIRELESS_NAMES = ("wl*", "wifi*", "ath[0-9]*", "ra[0-9]*", "wwan*", "ww[px]*", "rmnet*", "ppp*", "Wi-Fi*")

_VIRTUAL_TYPES = ("wireguard", "vxlan", "geneve", "gre", "ipip", "sit", "dummy", "ifb", "macsec")
"""The system's names of interface types that have no hardware and carry others' traffic."""

_SYSTEM = Path("/sys/class/net")


class Interface(NamedTuple):
    """One address of one interface of this machine."""

    name: str
    address: str  # numeric, without a scope
    kind: str  # see :func:`kind_of`
    prefix_bits: int
    scope: int = 0  # the interface's index for IPv6 link-local addresses


Listed = Tuple[str, str, int]
"""The name of an interface, one of its addresses, and the length of the network part."""
_SIOCGIFCONF, _SIOCGIFNETMASK = 0x8912, 0x891B


class InterfaceFilter:
    """The user's choice of interfaces, like ``eth0,!docker*,192.168.1.0/24``. Exclusions always win; if there
    is any inclusion, an address must match one. Raises ConfigError for a malformed network.
    """

    def __init__(self, spec: str) -> None:
        self._wanted: List[str] = []
        self._unwanted: List[str] = []
        for item in (part.strip() for part in spec.split(",")):
            if not item:
                continue
            target = self._unwanted if item.startswith("!") else self._wanted
            pattern = item.lstrip("!").strip()
            if "/" in pattern:
                try:
                    ipaddress.ip_network(pattern, strict=False)
                except ValueError as problem:
                    raise ConfigError(
                        f"--iface {item!r} is not a network: {problem}. Write 192.168.1.0/24, a name such "
                        "as eth0, a glob such as en*, or any of them with ! in front to exclude it."
                    ) from None
            target.append(pattern)

    def names(self, name: str, address: str) -> bool:
        """Return whether this address was asked for, not only not excluded."""
        return any(_matches(pattern, name, address) for pattern in self._wanted)

    def allows(self, name: str, address: str) -> bool:
        """Return whether this address of this interface may be used."""
        if any(_matches(pattern, name, address) for pattern in self._unwanted):
            return False
        return not self._wanted or self.names(name, address)


def _matches(pattern: str, name: str, address: str) -> bool:
    if "/" in pattern:
        return ipaddress.ip_address(address) in ipaddress.ip_network(pattern, strict=False)
    return fnmatch.fnmatchcase(name, pattern) or pattern == address


def _prefix_bits(netmask: object) -> int:
    if not isinstance(netmask, str) or not netmask:
        return 0
    return bin(int(ipaddress.ip_address(netmask.split("/")[0]))).count("1")


def spec_of(names: Union[str, Iterable[str], None]) -> Optional[str]:
    """Return Horovod's ``nics`` (or a single name) as a value of ``RINGCOMM_IFACE``; None: all interfaces."""
    return names or None if isinstance(names, str) else ",".join(names or ()) or None


def own_addresses(spec: str = "") -> List[Interface]:
    """Return this machine's addresses that are up and allowed, the loopback's always among them. Raises
    ConfigError if ``spec`` (see :class:`InterfaceFilter`) is malformed or allows none of them.
    """
    allowed = InterfaceFilter(spec)
    found: List[Interface] = []
    skipped: Dict[str, None] = {}
    for name, address, bits in _listed():
        kind = kind_of(name, address)
        if kind != LOOPBACK and not allowed.allows(name, address):
            skipped[f"{name} ({address})"] = None
            continue
        scope = 0
        if ":" in address and ipaddress.ip_address(address).is_link_local:
            try:
                scope = socket.if_nametoindex(name)
            except OSError:
                continue  # It has gone since it was listed.
        found.append(Interface(name, address, kind, bits, scope))
    wanted = any(item.kind == LOOPBACK and allowed.names(item.name, item.address) for item in found)
    if skipped and not wanted and all(item.kind == LOOPBACK for item in found):
        raise ConfigError(
            f"--iface {spec!r} matches none of this machine's interfaces. There are: {', '.join(skipped)}."
        )
    return sorted(found, key=_order)


def _listed() -> List[Listed]:
    """Return the addresses of the interfaces that are up."""
    try:
        import psutil

        statistics = psutil.net_if_stats()
    except ImportError:
        return [row for row in listed() if _text_of(_SYSTEM / row[0] / "operstate") != "down"]
    except OSError as problem:  # emulators and sandboxes refuse it; all count as up
        logger.debug("which interfaces are up is not known: %s", problem)
        return listed()
    return [row for row in listed() if row[0] not in statistics or statistics[row[0]].isup]


def listed() -> List[Listed]:
    """Return the addresses of all interfaces, up or not."""
    try:
        import psutil  # a fifth of ringcomm's own import time, and a job of one rank never gets here

        interfaces = psutil.net_if_addrs()
    except (ImportError, OSError):  # Linux hosts can do without it; sandboxes refuse it
        return listed_by_linux()
    return [
        (name, entry.address.split("%")[0], _prefix_bits(entry.netmask))
        for name, entries in interfaces.items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def listed_by_linux(root: str = "/") -> List[Listed]:
    """Return Linux's own list of addresses, without psutil: the loopback at least. ``root``: the file system.
    """
    try:
        found = _ipv4()
    except OSError as problem:
        logger.debug("the addresses of this machine are not known: %s", problem)
        found = [("lo", "127.0.0.1", 8)]
    for line in _text_of(Path(root, "proc/net/if_inet6")).splitlines():
        digits, _, bits, _, _, name = line.split()
        found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), int(bits, 16)))
    return found


def _ipv4() -> List[Listed]:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        row = 16 + max(16, struct.calcsize("LLHBBB0L"))  # struct ifreq: a name, an address or ifmap
        buffer = array.array("B", bytes(row * 256))
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        length = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
        data, found = buffer.tobytes(), []
        for offset in range(0, length, row):
            label = data[offset : offset + 16].split(b"\0")[0].decode()
            address = socket.inet_ntoa(data[offset + 20 : offset + 24])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFNETMASK, struct.pack("256s", label.encode()))
                bits = bin(struct.unpack("!I", answer[20:24])[0]).count("1")
            except OSError:
                bits = 32
            found.append((label.split(":")[0], address, bits))
    return found


def machine() -> str:
    """Return an identifier of this machine (or network namespace), independent of hostname and addresses."""
    parts = [_text_of(Path("/proc/sys/kernel/random/boot_id"))]
    try:
        parts.append(os.readlink("/proc/self/ns/net"))
    except OSError:
        parts.append("")  # not Linux, or /proc is not accessible: hostnames have to suffice
    if not any(parts):
        parts.append(socket.gethostname())
    return hashlib.sha256("/".join(parts).encode("utf-8", "replace")).hexdigest()[:16]


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def local_socket() -> Optional[Interface]:
    """Return a new name for a Unix socket without a file, which ends with its owner; None if unsupported."""
    name = f"@ringcomm-{secrets.token_hex(16)}"
    return Interface("unix", name, LOCAL, 0) if sys.platform.startswith("linux") else None


def _order(item: Interface) -> Tuple[int, bool, int, str, str]:
    preference = PREFERENCE.get(item.kind, len(PREFERENCE))
    last = max(preference, PREFERENCE[WIRELESS])  # IPv4 of a wireless one comes before IPv6 of a wired one
    return (last, ":" in item.address, preference, item.name, item.address)


def interface_of(address: str, interfaces: Sequence[Interface]) -> str:
    """Return the name of the interface with this address, or ``?``."""
    for item in interfaces:
        if item.address == address:
            return item.name
    return "?"


# -- kinds -----------------------------------------------------------------------------------------


def kind_of(name: str, address: str, system: Path = _SYSTEM) -> str:
    """Return the kind of an interface with one of its addresses. ``system``: Linux's directory of interfaces.
    """
    if is_loopback(address):
        return LOOPBACK
    return _told_by_system(name, system) or _kind_of_name(name)


def worse_kind(one: str, other: str) -> str:
    """Return the kind of a route between interfaces of these kinds: the worse one."""
    return max((kind if kind in PREFERENCE else WIRED for kind in (one, other)), key=PREFERENCE.__getitem__)


def _kind_of_name(name: str) -> str:
    for kind, patterns in ((VIRTUAL, _VIRTUAL_NAMES), (WIRELESS, _WIRELESS_NAMES)):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return kind
    return WIRED


def _told_by_system(name: str, system: Path) -> Optional[str]:
    """Return the kind that ``/sys`` shows; None if it shows no more than the name."""
    described = system / name
    if (described / "wireless").exists() or (described / "phy80211").exists():
        return WIRELESS
    device = re.search("^DEVTYPE=(.*)", _text_of(described / "uevent"), re.MULTILINE)
    if device and device[1] in ("wlan", "wwan"):
        return WIRELESS
    if (device and device[1] in _VIRTUAL_TYPES) or (described / "tun_flags").exists():
        return VIRTUAL
    members = _names_in(described / "brif")
    members += [name[len("lower_") :] for name in _names_in(described) if name.startswith("lower_")]
    kinds = [kind for kind in (_kind_of_hardware(member, system) for member in members) if kind]
    return min(kinds, key=PREFERENCE.__getitem__) if kinds else None


def _kind_of_hardware(name: str, system: Path) -> Optional[str]:
    """Return the kind of a bridge's or bond's member if it is hardware (or based on hardware)."""
    kind = _told_by_system(name, system)
    if kind in (WIRED, WIRELESS):
        return kind
    if kind is None and (system / name / "device").exists() and _kind_of_name(name) != VIRTUAL:
        return _kind_of_name(name)
    return None


def _names_in(directory: Path) -> List[str]:
    try:
        return sorted(item.name for item in directory.iterdir())
    except OSError:
        return []


# -- routes ----------------------------------------------------------------------------------------

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
            local, iface, remote_iface, kind, why = (str(data[name]) for name in cls._fields[4:9])
            source, target, port = (int(data[name]) for name in ("source", "target", "port"))
            return cls(
                source, target, str(data["address"]), port, local, iface, remote_iface, kind, why,
                None if speed is None else float(speed), bool(data["too_slow"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError) as problem:
            raise ProtocolError(f"a report of dialled addresses is malformed: {problem!r}") from None


def not_dialled(source: int, target: int, offer: Mapping[str, Any]) -> Attempt:
    """Return the report for an address that the target has, and the source's machine as well."""
    why = "not dialled, because that host has this address itself"
    kind = worse_kind(WIRED, str(offer.get("kind", WIRED)))
    address, port, iface = str(offer["address"]), int(offer["port"]), str(offer.get("iface", "?"))
    return Attempt(source, target, address, port, "", "?", iface, kind, why)


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
    """Return the best successful attempt of every wire between two hosts, the preferred one first: routable
    addresses before link-local ones, IPv4 before IPv6, then a fixed order, so that every start of a job
    chooses alike.
    """
    best: Dict[Wire, Attempt] = {}
    for item in sorted((item for item in attempts if not item.why), key=_attempt_order):
        best.setdefault(wire_of(item), item)
    return list(best.values())


def choose(wires: Sequence[Attempt], measured: Sequence[Mapping[Wire, float]]) -> Optional[int]:
    """Return the index of the candidate to use by all measurements (MB/s by wire) so far, or None to measure
    again.
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


def _attempt_order(item: Attempt) -> Tuple[int, bool, bool, int, str]:
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
