"""Which addresses a machine has, of what kind they are, and which of them the user allows."""

from __future__ import annotations

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
    Interface,
    InterfaceFilter,
    kind_of,
    own_addresses,
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


@pytest.mark.parametrize(
    "spec, names",
    [
        ("eth0", {"eth0", "lo"}),
        ("!docker*", {"eth0", "wlan0", "lo"}),
        ("192.168.2.0/24", {"wlan0", "lo"}),
        ("docker0", {"docker0", "lo"}),
    ],
)
def test_the_users_choice_always_keeps_the_loopback(machine, spec, names):
    machine(JETSON)
    assert {item.name for item in own_addresses(spec)} == names


@pytest.mark.parametrize("spec", ["eth7", "10.0.0.0/8", "!eth0,!wlan0,!docker0"])
def test_a_choice_of_nothing_lists_what_there_is(machine, spec):
    machine(JETSON)
    with pytest.raises(ConfigError, match=r"eth0 \(192.168.1.20\)") as caught:
        own_addresses(spec)
    assert repr(spec) in str(caught.value)
    assert "down0" not in str(caught.value)


class TestWithoutProc:
    """On other systems, and where /proc is not accessible."""

    @pytest.fixture(autouse=True)
    def no_proc(self, monkeypatch):
        def missing(*arguments, **options):
            raise FileNotFoundError(2, "No such file or directory")

        monkeypatch.setattr(nics.os, "readlink", missing)
        monkeypatch.setattr(nics.Path, "read_text", missing)

    def test_the_hostname_has_to_suffice(self, monkeypatch):
        found = nics.machine()
        assert found == nics.machine() and len(found) == 16
        monkeypatch.setattr(nics.socket, "gethostname", lambda: "another")
        assert nics.machine() != found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere psutil is needed")
def test_without_psutil_linux_itself_lists_the_addresses(monkeypatch):
    """`ringrun doctor` examines hosts that lack it."""
    usual = {item.address for item in own_addresses() if item.kind == LOOPBACK and ":" not in item.address}
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert usual <= {item.address for item in own_addresses()}


def test_what_linux_lists_of_ipv6(tmp_path):
    (tmp_path / "proc/net").mkdir(parents=True)
    addresses = ("fd00000000000000000000000000000b", "fe800000000000000000000000000001")
    rows = [f"{address} 02 40 20 80 eth0" for address in addresses]
    (tmp_path / "proc/net/if_inet6").write_text("\n".join(rows))
    listed = nics.listed_by_linux(str(tmp_path))
    assert listed[-2:] == [("eth0", "fd00::b", 64), ("eth0", "fe80::1", 64)]


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
