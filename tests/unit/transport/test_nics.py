"""Which addresses a machine has, of what kind they are, and which of them the user allows."""

from __future__ import annotations

import itertools
import socket
import sys
import types

import psutil
import pytest

from ringcomm.errors import ConfigError
from ringcomm.transport import nics
from ringcomm.transport.nics import (
    LOOPBACK,
    VIRTUAL,
    WIRED,
    WIRELESS,
    Attempt,
    Interface,
    InterfaceFilter,
    candidates,
    choose,
    kind_of,
    own_addresses,
    wire_of,
)


@pytest.mark.parametrize(
    "spec, name, address, allowed",
    [
        ("", "eth0", "10.0.0.1", True),
        ("eth0", "eth0", "10.0.0.1", True),
        ("eth0", "eth1", "10.0.0.1", False),
        ("eth1,eth0", "eth0", "10.0.0.1", True),
        ("en*", "enp3s0", "10.0.0.1", True),
        ("eth[0-2]", "eth2", "10.0.0.1", True),
        ("10.0.0.1", "eth0", "10.0.0.1", True),
        ("192.168.1.0/24", "eth0", "192.168.1.77", True),
        ("192.168.1.0/24", "eth0", "192.168.2.77", False),
        ("fd00::/8", "eth0", "fd12::1", True),
        ("!docker*", "docker0", "172.17.0.1", False),
        ("!docker*", "eth0", "10.0.0.1", True),
        ("!172.16.0.0/12", "br-1234", "172.18.0.1", False),
        ("eth*,!eth1", "eth0", "10.0.0.1", True),
        ("eth*,!eth1", "eth1", "10.0.0.1", False),
        ("10.0.0.0/8,!eth1", "eth1", "10.0.0.1", False),
    ],
)
def test_filter(spec, name, address, allowed):
    assert InterfaceFilter(spec).allows(name, address) is allowed


@pytest.mark.parametrize("spec", ["10.0.0.0/33", "!fd00::/129", "eth0,x/8"])
def test_no_network(spec):
    with pytest.raises(ConfigError, match="is not a network"):
        InterfaceFilter(spec)

# ---- this machine, as told by psutil ---------------------------------------------------------


def v4(address, netmask="255.255.255.0"):
    return types.SimpleNamespace(family=socket.AF_INET, address=address, netmask=netmask)


def v6(address, netmask="ffff:ffff:ffff:ffff::"):
    return types.SimpleNamespace(family=socket.AF_INET6, address=address, netmask=netmask)


JETSON = {
    "lo": [v4("127.0.0.1", "255.0.0.0"), v6("::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")],
    "docker0": [v4("172.17.0.1", "255.255.0.0")],
    "eth0": [
        v6("fe80::aa%eth0"),
        v4("192.168.1.20"),
        types.SimpleNamespace(family=17, address="00:11:22:33:44:55", netmask=None),
        v6("fd00::20", None),
    ],
    "wlan0": [v4("192.168.2.20")],
    "down0": [v4("10.1.1.1")],
}


@pytest.fixture
def machine(monkeypatch):
    def set_up(interfaces, down=("down0",)):
        statistics = {name: types.SimpleNamespace(isup=name not in down) for name in interfaces}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: statistics)
        monkeypatch.setattr(nics.socket, "if_nametoindex", lambda name: 2 + list(interfaces).index(name))

    return set_up


def test_own_addresses_of_a_jetson(machine):
    machine(JETSON)
    assert own_addresses() == [
        Interface("eth0", "192.168.1.20", WIRED, 24),
        Interface("wlan0", "192.168.2.20", WIRELESS, 24),
        Interface("eth0", "fd00::20", WIRED, 0),
        Interface("eth0", "fe80::aa", WIRED, 64, 4),
        Interface("docker0", "172.17.0.1", VIRTUAL, 16),
        Interface("lo", "127.0.0.1", LOOPBACK, 8),
        Interface("lo", "::1", LOOPBACK, 128),
    ]


@pytest.mark.parametrize("spec", ["eth7", "10.0.0.0/8", "!eth0,!wlan0,!docker0"])
def test_a_choice_of_nothing_lists_what_there_is(machine, spec):
    machine(JETSON)
    with pytest.raises(ConfigError, match=r"eth0 \(192.168.1.20\)") as caught:
        own_addresses(spec)
    assert repr(spec) in str(caught.value)
    assert "down0" not in str(caught.value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere psutil is needed")
def test_without_psutil_linux_itself_lists_the_addresses(monkeypatch):
    """`ringrun doctor` examines hosts that lack it."""
    usual = {item.address for item in own_addresses() if item.kind == LOOPBACK and ":" not in item.address}
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert usual <= {item.address for item in own_addresses()}


@pytest.mark.parametrize(
    "name, address, kind",
    [
        ("eth0", "10.0.0.1", WIRED),
        ("enp3s0", "fe80::1", WIRED),
        ("br0", "10.0.0.1", WIRED),
        ("wlan0", "192.168.0.2", WIRELESS),
        ("wlp2s0", "192.168.0.2", WIRELESS),
        ("wwan0", "100.64.0.1", WIRELESS),
        ("lo", "127.0.0.1", LOOPBACK),
        ("eth0", "127.0.1.1", LOOPBACK),
        ("docker0", "172.17.0.1", VIRTUAL),
        ("br-0123456789ab", "172.18.0.1", VIRTUAL),
        ("tailscale0", "100.64.0.1", VIRTUAL),
        ("l4tbr0", "192.168.55.1", VIRTUAL),
        ("usb0", "192.168.55.100", VIRTUAL),
    ],
)
def test_names(name, address, kind, tmp_path):
    assert kind_of(name, address, tmp_path) == kind


@pytest.fixture
def system(tmp_path):
    """Describe interfaces as Linux does: each name with the files that it has, and what they hold."""

    def describe(**interfaces):
        for name, entries in interfaces.items():
            for path, text in {"address": "", **entries}.items():
                file = tmp_path / name.replace("_", "-") / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        return tmp_path

    return describe


RADIO = {"device/vendor": "", "phy80211/name": ""}
OLD_RADIO = {"device/vendor": "", "wireless/status": ""}
CARD = {"device/vendor": ""}


@pytest.mark.parametrize(
    "name, interfaces, kind",
    [
        ("lan0", {"lan0": RADIO}, WIRELESS),
        ("lan0", {"lan0": OLD_RADIO}, WIRELESS),
        ("wlan0", {"wlan0": CARD}, WIRELESS),  # no radio is seen from inside a container
        ("office", {"office": {"tun_flags": "0x1001"}}, VIRTUAL),
        ("office", {"office": {"uevent": "DEVTYPE=wireguard\n"}}, VIRTUAL),
        ("eth0", {"eth0": CARD}, WIRED),
        ("eth0", {"eth0": {}}, WIRED),  # the end of a cable into a container
        ("usb0", {"usb0": CARD}, VIRTUAL),  # the device mode of a board is hardware, too
        # bridges are what their members are
        ("br-lan", {"br_lan": {"brif/eth0/x": "", "lower_eth0/x": ""}, "eth0": CARD}, WIRED),
        ("br0", {"br0": {"brif/wlan0/x": ""}, "wlan0": RADIO}, WIRELESS),
        ("br0", {"br0": {"brif/eth0/x": "", "brif/wlan0/x": ""}, "eth0": CARD, "wlan0": RADIO}, WIRED),
        ("docker0", {"docker0": {"brif/veth1/x": ""}, "veth1": {}}, VIRTUAL),
        ("lab", {"lab": {"brif/veth1/x": "", "uevent": "DEVTYPE=bridge\n"}, "veth1": {}}, WIRED),
        (
            "l4tbr0",
            {"l4tbr0": {"brif/usb0/x": "", "brif/rndis0/x": ""}, "usb0": CARD, "rndis0": CARD},
            VIRTUAL,
        ),
        # and so are bonds and VLANs
        ("bond0", {"bond0": {"lower_eth0/x": "", "lower_wlan0/x": ""}, "eth0": CARD, "wlan0": RADIO}, WIRED),
        ("br0", {"br0": {"brif/eth0.5/x": ""}, "eth0.5": {"lower_eth0/x": ""}, "eth0": CARD}, WIRED),
    ],
)
def test_what_linux_says(system, name, interfaces, kind):
    assert kind_of(name, "10.0.0.1", system(**interfaces)) == kind


def tried(address="10.0.0.2", local_iface="eth0", remote_iface="eth0", speed=None, why="", **more):
    names = local_iface + remote_iface
    kind = more.pop("kind", VIRTUAL if "docker" in names else WIRELESS if "wlan" in names else WIRED)
    values = {"source": 0, "target": 1, "port": 5000, "local": "10.0.0.1", **more}
    return Attempt(
        address=address, local_iface=local_iface, remote_iface=remote_iface, kind=kind, why=why,
        mb_per_s=speed, **values,
    )  # fmt: skip


SAME_ADDRESS = tried("172.17.0.1", "docker0", "docker0", why="rank 0 answered there, not rank 1")
OVERLAY = tried("172.20.0.2", "docker1", "docker1")
WIRE = tried("10.0.0.2", "eth0", "enp3s0")
WIFI = tried("192.168.0.2", "wlan0", "wlan0")
WIRE_V6 = tried("fd00::2", "eth0", "enp3s0")
WIRE_LOCAL = tried("fe80::2", "eth0", "enp3s0")
REFUSED = tried("10.9.0.2", why="connection refused")

SECOND_WIRE = tried("10.8.0.2", "eth1", "enp4s0")


def chosen(*attempts, speeds=()):
    """Return the address that wins, whatever the order of the reported attempts; None: measure (again).
    `speeds` are for each measurement those of the attempts' wires; None: it broke.
    """
    permutations = list(itertools.permutations(range(len(attempts))))
    results = set()
    for order in permutations if len(attempts) < 6 else [permutations[0], permutations[-1]]:
        wires = candidates([attempts[index] for index in order])
        if not wires:
            results.add(None)
            continue
        measured = [
            {wire_of(item): speed for item, speed in zip(attempts, each) if speed is not None}
            for each in speeds
        ]
        index = choose(wires, measured)
        results.add(None if index is None else wires[index].address)
    assert len(results) == 1
    return results.pop()


def test_the_docker_twin_never_wins():
    assert chosen(SAME_ADDRESS, WIRE) == WIRE.address
    assert chosen(SAME_ADDRESS, WIRE, speeds=[(9999.0, 0.1)] * 3) == WIRE.address
    assert chosen(SAME_ADDRESS, OVERLAY) == OVERLAY.address


@pytest.mark.parametrize(
    "attempts, order",
    [
        ([], []),
        ([SAME_ADDRESS, REFUSED], []),
        ([OVERLAY, WIFI, WIRE], [WIRE, WIFI, OVERLAY]),
        ([WIFI, WIRE, SAME_ADDRESS, REFUSED], [WIRE, WIFI]),
        ([WIRE_LOCAL, WIRE_V6, WIRE], [WIRE]),
        ([WIRE_LOCAL, WIRE_V6], [WIRE_V6]),
        ([SECOND_WIRE, WIRE, WIRE_V6], [WIRE, SECOND_WIRE]),
        ([tried("169.254.3.4"), SECOND_WIRE], [SECOND_WIRE, tried("169.254.3.4")]),
        ([OVERLAY, OVERLAY._replace(local_iface="docker2")],) * 2,
    ],
)
def test_one_of_each_wire_the_preferred_first(attempts, order):
    assert candidates(attempts) == order


@pytest.mark.parametrize(
    "attempts, speeds, winner",
    [
        # of one kind, nothing but two measurements that agree shows which is slow
        ((WIRE, SECOND_WIRE), [(100.0, 100.0)], None),
        ((WIRE, SECOND_WIRE), [(100.0, 2.5)], None),
        ((WIRE, WIFI, tried("192.168.7.2", "wlan1", "wlan1")), [(100.0, 2.5, 2.5)], WIRE),
        # equal, or nearly so: the fixed order
        ((WIRE, SECOND_WIRE), [(100.0, 100.0)] * 2, WIRE),
        ((WIRE, SECOND_WIRE), [(700.0, 9000.0)] * 2, WIRE),  # there it is the processor that is measured
        # faster: only if a second measurement says so
        ((WIRE, SECOND_WIRE), [(100.0, 161.0)], None),
        ((WIRE, SECOND_WIRE), [(100.0, 161.0)] * 2, SECOND_WIRE),
        ((WIRE, SECOND_WIRE), [(10.0, 100.0), (100.0, 100.0), (100.0, 90.0)], WIRE),
        # of another kind: only if it is much faster
        ((WIRE, WIFI), [(100.0, 399.0)], WIRE),
        ((WIRE, WIFI), [(100.0, 399.0)] * 2, WIRE),
        # both were fast, and the wire had no processor for moments: seen in one of 100 starts at load 10
        ((WIRE, WIFI), [(100.0, 1700.0)] * 2, WIRE),
        ((WIRE, WIFI), [(20.0, 81.0)], None),
        ((WIRE, WIFI), [(20.0, 81.0)] * 2, WIFI),
        ((WIRE, OVERLAY), [(2.5, 2000.0)] * 2, OVERLAY),
        ((WIFI, OVERLAY), [(2.5, 700.0)] * 2, OVERLAY),
        # a burst passed for once
        ((WIRE, WIFI), [(2.0, 900.0), (110.0, 2.5), (110.0, 2.5)], WIRE),
        # a virtual one does not make a slower real one look slow
        ((WIRE, SECOND_WIRE, OVERLAY), [(10.0, 100.0, 390.0)] * 2, SECOND_WIRE),
        # what breaks while it is measured
        ((WIRE, WIFI), [(None, 1.0)] * 2, WIFI),
        # three measurements, three results: the preferred of them
        ((WIRE, WIFI, OVERLAY), [(1.0, 1.0, 100.0), (1.0, 100.0, 1.0), (100.0, 1.0, 1.0)], WIRE),
    ],
)
def test_what_measurements_decide(attempts, speeds, winner):
    assert chosen(*attempts, speeds=speeds) == (None if winner is None else winner.address)


def test_either_direction_will_do():
    back = tried("10.0.0.1", "enp3s0", "eth0", source=1, target=0)
    assert wire_of(back) == wire_of(WIRE)
    assert candidates([WIRE._replace(why="no route to host"), back]) == [back]
    assert candidates([back, WIRE]) == [WIRE]
