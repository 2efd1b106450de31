"""The kind of an interface: wired, wireless, virtual, or the loopback.

The name decides where there is no better information. On Linux ``/sys`` has more: it marks wireless
interfaces and tunnels whatever their names, and a bridge has the kind of its members. A bridge whose members
only lead to containers or virtual machines stays undecided, because a lab's switch looks like that as well as
``docker0``; there the bridge's own name decides.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import List, Optional

from ..configuration.endpoints import is_loopback

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


def kind_of(name: str, address: str, system: Path = _SYSTEM) -> str:
    """Return the kind of an interface with one of its addresses. ``system`` is Linux's directory of
    interfaces; without it names decide.
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
    kind = _device_type(described)
    if kind in ("wlan", "wwan"):
        return WIRELESS
    if kind in _VIRTUAL_TYPES or (described / "tun_flags").exists():
        return VIRTUAL
    members = [item.name for item in _entries(described / "brif")]
    members += [item.name[len("lower_") :] for item in _entries(described) if item.name.startswith("lower_")]
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


def _device_type(described: Path) -> str:
    try:
        text = (described / "uevent").read_text()
    except OSError:
        return ""
    return next((line[len("DEVTYPE=") :] for line in text.splitlines() if line.startswith("DEVTYPE=")), "")


def _entries(directory: Path) -> List[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
