"""What kind of interface a name stands for, from its name and from what Linux says of it."""

from __future__ import annotations

import pytest

from ringcomm.transport.kinds import LOOPBACK, VIRTUAL, WIRED, WIRELESS, kind_of, worse_kind


@pytest.mark.parametrize(
    "name, address, kind",
    [
        ("eth0", "10.0.0.1", WIRED),
        ("enp3s0", "fe80::1", WIRED),
        ("bond0", "10.0.0.1", WIRED),
        ("ib0", "10.0.0.1", WIRED),
        ("en0", "10.0.0.1", WIRED),
        ("br0", "10.0.0.1", WIRED),
        ("wlan0", "192.168.0.2", WIRELESS),
        ("wlp2s0", "192.168.0.2", WIRELESS),
        ("wlx00c0ca", "192.168.0.2", WIRELESS),
        ("wwan0", "100.64.0.1", WIRELESS),
        ("ppp0", "100.64.0.1", WIRELESS),
        ("lo", "127.0.0.1", LOOPBACK),
        ("lo0", "::1", LOOPBACK),
        ("eth0", "127.0.1.1", LOOPBACK),
        ("docker0", "172.17.0.1", VIRTUAL),
        ("br-0123456789ab", "172.18.0.1", VIRTUAL),
        ("veth12ab", "fe80::1", VIRTUAL),
        ("virbr0", "192.168.122.1", VIRTUAL),
        ("tailscale0", "100.64.0.1", VIRTUAL),
        ("wg0", "10.9.0.1", VIRTUAL),
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
        ("lan0", {"lan0": {"uevent": "DEVTYPE=wlan\nINTERFACE=lan0\n"}}, WIRELESS),
        ("modem", {"modem": {"uevent": "DEVTYPE=wwan\n"}}, WIRELESS),
        ("wlan0", {"wlan0": CARD}, WIRELESS),  # no radio is seen from inside a container
        ("office", {"office": {"tun_flags": "0x1001"}}, VIRTUAL),
        ("office", {"office": {"uevent": "DEVTYPE=wireguard\n"}}, VIRTUAL),
        ("office", {"office": {"uevent": "DEVTYPE=vxlan\n"}}, VIRTUAL),
        ("eth0", {"eth0": CARD}, WIRED),
        ("eth0", {"eth0": {}}, WIRED),  # the end of a cable into a container
        ("usb0", {"usb0": CARD}, VIRTUAL),  # the device mode of a board is hardware, too
        # bridges are what their members are
        ("br-lan", {"br_lan": {"brif/eth0/x": "", "lower_eth0/x": ""}, "eth0": CARD}, WIRED),
        ("vmbr0", {"vmbr0": {"brif/eno1/x": "", "brif/tap7/x": ""}, "eno1": CARD}, WIRED),
        ("br0", {"br0": {"brif/wlan0/x": ""}, "wlan0": RADIO}, WIRELESS),
        ("br0", {"br0": {"brif/eth0/x": "", "brif/wlan0/x": ""}, "eth0": CARD, "wlan0": RADIO}, WIRED),
        ("docker0", {"docker0": {"brif/veth1/x": ""}, "veth1": {}}, VIRTUAL),
        ("docker0", {"docker0": {"uevent": "DEVTYPE=bridge\n"}}, VIRTUAL),
        ("lab", {"lab": {"brif/veth1/x": "", "uevent": "DEVTYPE=bridge\n"}, "veth1": {}}, WIRED),
        (
            "l4tbr0",
            {"l4tbr0": {"brif/usb0/x": "", "brif/rndis0/x": ""}, "usb0": CARD, "rndis0": CARD},
            VIRTUAL,
        ),
        # and so are bonds and VLANs
        ("bond0", {"bond0": {"lower_eth0/x": "", "lower_wlan0/x": ""}, "eth0": CARD, "wlan0": RADIO}, WIRED),
        ("home.7", {"home.7": {"lower_wlan0/x": "", "uevent": "DEVTYPE=vlan\n"}, "wlan0": RADIO}, WIRELESS),
        ("br0", {"br0": {"brif/eth0.5/x": ""}, "eth0.5": {"lower_eth0/x": ""}, "eth0": CARD}, WIRED),
    ],
)
def test_what_linux_says(system, name, interfaces, kind):
    assert kind_of(name, "10.0.0.1", system(**interfaces)) == kind


@pytest.mark.parametrize(
    "one, other, route",
    [
        (WIRED, WIRED, WIRED),
        (WIRED, WIRELESS, WIRELESS),
        (WIRELESS, VIRTUAL, VIRTUAL),
        (VIRTUAL, WIRED, VIRTUAL),
        ("", "", WIRED),
        (LOOPBACK, WIRELESS, WIRELESS),
    ],
)
def test_a_route_is_no_better_than_either_end(one, other, route):
    assert worse_kind(one, other) == worse_kind(other, one) == route
