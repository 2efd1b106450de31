"""The cables of a lab: which there are, and what is done to them; see netlab.py."""

from __future__ import annotations

from typing import Dict, FrozenSet, Iterable, List, Sequence, Set, Tuple

from tests.hosts import netlab_plan as plans
from tests.hosts import netlab_system as system
from tests.hosts.netlab_plan import LOCALHOST, Host, Port
from tests.hosts.netlab_system import ip, sh

WLAN_RATE = ("20mbit", "64kb", "50ms")
OTHER_WAY = {"input": "output", "output": "input"}
WAYS = ("input", "output")


class Cables:
    """Faults of the links of some hosts; an interface is given by name or role. `number` is the lab's."""

    def __init__(self, hosts: List[Host]) -> None:
        self.hosts = hosts
        self.number = 0
        self._ports: Dict[Tuple[str, str], Port] = {}
        self._cuts: Dict[FrozenSet[str], Tuple[str, Sequence[str], str]] = {}
        self._unplugged: Set[Port] = set()
        self._shaped: Set[Port] = set()

    def _own_ports(self, name: str) -> List[Port]:
        return [port for port in self._ports.values() if port.host == name]

    def _port(self, host: str, iface: str) -> Port:
        for port in self._own_ports(host):
            if iface in (port.role, port.iface):
                return port
        raise KeyError(f"{host} has no interface {iface}")

    def _tbf(self, port: Port, rate: str, burst: str, latency: str, ways: Sequence[str] = WAYS) -> None:
        for way in ways:
            where, device = self._sender(port, way)
            limit = ["tbf", "rate", rate, "burst", burst, "latency", latency]
            sh("tc", *where, "qdisc", "replace", "dev", device, "root", *limit)

    def _sender(self, port: Port, way: str) -> Tuple[List[str], str]:
        """Return what sends over a cable in this direction, seen from the host.

        Options of `tc`, and the device.
        """
        if way == "input":
            return ["-n", plans.switch_of(self.number)], port.near
        return ["-n", port.netns] if port.netns else [], port.iface

    def shape(
        self, host: str, iface: str, rate: str, burst: str = "256kb", latency: str = "10ms",
        ways: Sequence[str] = WAYS,
    ) -> None:  # fmt: skip
        """Limit a link: `rate` as tc writes it, such as "100mbit", in both directions or in one of them.

        The other direction is not limited at all then. `ways` are the host's, as those of :meth:`cut`.
        """
        self.unlimit(host, iface)
        self._tbf(self._port(host, iface), rate, burst, latency, ways)

    def unlimit(self, host: str, iface: str) -> None:
        """Take every limit off a link, also the one that it started with."""
        port = self._port(host, iface)
        self._shaped.add(port)
        for way in WAYS:
            where, device = self._sender(port, way)
            sh("tc", *where, "qdisc", "del", "dev", device, "root", check=False)

    def unshape(self, host: str, iface: str) -> None:
        """Give a link back the speed it started with: eth unlimited, wlan 20 Mbit/s."""
        port = self._port(host, iface)
        self.unlimit(host, iface)
        self._shaped.discard(port)
        if port.role == "wlan":
            self._tbf(port, *WLAN_RATE)

    def cut(
        self, host: str, peers: Iterable[str] | None = None, action: str = "drop", ways: Sequence[str] = WAYS
    ) -> None:
        """Silently drop everything between a host and `peers` (by default all others, with "localhost").

        `action` can be "reject with tcp reset"; `ways` are the host's: with "input" its own packets get out.
        """
        self._cuts.update(dict.fromkeys(self._pairs(host, peers), (host, ways, action)))
        self._apply_cuts()

    def heal(self, host: str, peers: Iterable[str] | None = None) -> None:
        """Let a host and `peers` (by default all) reach each other again."""
        for pair in self._pairs(host, peers):
            self._cuts.pop(pair, None)
        self._apply_cuts()

    def _pairs(self, host: str, peers: Iterable[str] | None) -> Set[FrozenSet[str]]:
        names = {LOCALHOST, *(each.name for each in self.hosts)}
        others = names - {host} if peers is None else set(peers)
        if host not in names or not others <= names - {host}:
            raise KeyError(f"no such hosts to cut apart: {host} and {sorted(others)}")
        return {frozenset((host, other)) for other in others}

    def _apply_cuts(self) -> None:
        """Write each host's rules anew. The root needs none: what it sends or should get is dropped there."""
        for host in self.hosts:
            netns = str(self._port(host.name, "eth").netns)
            cuts = [
                (way if host.name == by else OTHER_WAY[way], address, action)
                for pair, (by, ways, action) in self._cuts.items()
                for peer in pair - {host.name}
                if host.name in pair
                for address in sorted(self._live_addresses(peer))
                for way in ways
            ]
            system.in_netns(netns, "nft", "-f", "-", stdin=plans.cut_rules(cuts))

    def _live_addresses(self, host: str) -> List[str]:
        """Every address of a host's lab interfaces as the kernel has them now, with the link-local ones."""
        ports = {port.iface: port for port in self._own_ports(host)}
        links = system.ip_json(self._port(host, "eth").netns, "addr", "show")
        return [info["local"] for link in links if link["ifname"] in ports for info in link["addr_info"]]

    def unplug(self, host: str, iface: str) -> None:
        """Pull a cable: the interface keeps its addresses and loses its carrier."""
        port = self._port(host, iface)
        self._unplugged.add(port)
        ip(plans.switch_of(self.number), "link", "set", port.near, "down")

    def plug(self, host: str, iface: str) -> None:
        """Put the cable back."""
        port = self._port(host, iface)
        self._unplugged.discard(port)
        ip(plans.switch_of(self.number), "link", "set", port.near, "up")
