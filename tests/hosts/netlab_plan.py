"""What a lab consists of, as data: hosts, their interfaces and addresses, the `ip` commands to make them, and
the files of SSH. netlab.py carries the commands out.
"""

from __future__ import annotations

import shutil
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Sequence, Tuple

from tests.hosts.netlab_system import DOCKER_ADDRESS, TOOL_PATH, LabError, networks, sh

LOCALHOST = "localhost"
BRIDGES = {"eth": "lan", "wlan": "wlan"}

# docker0's one container, without which it would have no carrier: a cable whose other end is on no bridge.
DOCKER_MEMBER = "vethc0ffee"

# What PID 1 of a host does: $1 is the host's directory, $2 is sshd, which insists on /run/sshd, $3 is the
# root file system, or empty for this machine's. A login sees that one, with changes of its own.
# A boot_id, machine-id and /dev/shm of its own keep two hosts from being taken for one.
INIT = """
set -e
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cat "$1/hostname" > /proc/sys/kernel/hostname
for name in hosts hostname machine-id; do
    if [ -e "/etc/$name" ]; then mount --bind "$1/$name" "/etc/$name"; fi
done
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
mkdir -p /run/sshd
if [ -n "$3" ]; then
    mkdir -p "$1/changes" "$1/root"
    mount -t tmpfs tmpfs "$1/changes"
    mkdir "$1/changes/files" "$1/changes/work"
    mount -t overlay -o "lowerdir=$3,upperdir=$1/changes/files,workdir=$1/changes/work" overlay "$1/root"
    for name in hosts hostname machine-id; do cp "$1/$name" "$1/root/etc/$name"; done
    for name in proc sys dev; do mount --rbind "/$name" "$1/root/$name"; done
fi
exec "$2" -D -e -f "$1/sshd_config"
"""


@dataclass(frozen=True)
class Host:
    """One host to make: its name, the names of its interfaces, and which addresses they have.

    Without `wlan` (None) it has no second interface. Link-local IPv6 addresses are always there. `root` is
    the folder with the root file system that a login sees, if it is not this machine's.
    """

    name: str
    eth: str = "eth0"
    wlan: str | None = "wlan0"
    ipv6_only: bool = False
    root: str = ""


@dataclass(frozen=True)
class Port:
    """One interface of a host, and the other end of its cable, `near`, in the switch's namespace."""

    host: str
    role: str
    netns: str | None
    iface: str
    near: str
    addresses: Tuple[str, ...]


Ports = Dict[Tuple[str, str], Port]


def switch_of(number: int) -> str:
    return f"rl{number}.switch"


def netns_of(number: int, host: str) -> str | None:
    """The network namespace of a host; None is the root's."""
    return None if host == LOCALHOST else f"rl{number}-{host}"


def plan(number: int, hosts: Sequence[Host]) -> Ports:
    """Decide each interface's name and addresses: (host, role) to port, the root's first."""
    root = Host(
        LOCALHOST, eth=f"rl{number}e", wlan=f"rl{number}w" if any(host.wlan for host in hosts) else None,
        ipv6_only=all(host.ipv6_only for host in hosts),
    )
    ports: Ports = {}
    for index, host in enumerate([root, *hosts]):
        for role, iface in (("eth", host.eth), ("wlan", host.wlan)):
            if iface is None:
                continue
            net4, net6 = networks(number)[role]
            own = 10 + index if index else 1
            addresses = [] if host.ipv6_only else [net4.replace(".0/", f".{own}/")]
            if host.ipv6_only or (not index and any(each.ipv6_only for each in hosts)):
                addresses.append(net6.replace("::", f"::{own}"))
            near = f"p{index}{role[0]}"
            netns = netns_of(number, host.name)
            ports[host.name, role] = Port(host.name, role, netns, iface, near, tuple(addresses))
    return ports


def bridge_lines() -> List[str]:
    text = "link add {0} type bridge forward_delay 0 mcast_snooping 0\nlink set {0} up"
    return [line for bridge in BRIDGES.values() for line in text.format(bridge).split("\n")]


def root_lines(number: int, ports: Ports, own_docker: bool, bridged: bool) -> List[str]:
    """`ip` commands for the root namespace. Were a link lost, the lab's traffic must not go elsewhere.

    With `bridged`, the root's addresses are on bridges, as on a machine that serves virtual machines.
    """
    lines = []
    for net4, net6 in networks(number).values():
        lines.append(f"route replace unreachable {net4} metric 4000")
        if any(":" in address for address in ports[LOCALHOST, "eth"].addresses):
            lines.append(f"route replace unreachable {net6} metric 4000")
    for port in ports.values():
        if port.host == LOCALHOST:
            cable = port.iface + "m" if bridged else port.iface
            lines.append(f"link add {cable} type veth peer name {port.near} netns {switch_of(number)}")
            if bridged:
                lines.append(f"link add {port.iface} type bridge forward_delay 0 mcast_snooping 0")
                lines.append(f"link set {cable} master {port.iface} up")
            lines += address_lines(port)
    if own_docker:
        lines.append(f"link add rl{number}d type veth peer name p0d netns {switch_of(number)}")
        lines.append(f"link set rl{number}d master docker0 up")
    return lines


def switch_lines(ports: Ports, docker: bool, own_docker: bool) -> List[str]:
    """`ip` commands that lay the hosts' cables and put their near ends, and the root's, on the bridges."""
    lines = ["link set p0d up"] if own_docker else []
    for port in ports.values():
        if port.netns:
            lines.append(f"link add {port.near} type veth peer name {port.iface} netns {port.netns}")
            if docker and port.role == "eth":
                member = port.near[:-1] + "d"
                lines.append(f"link add {member} type veth peer name {DOCKER_MEMBER} netns {port.netns}")
                lines.append(f"link set {member} up")
        lines.append(f"link set {port.near} master {BRIDGES[port.role]} up")
    return lines


def host_lines(ports: Iterable[Port], docker: bool) -> List[str]:
    lines = ["link set lo up"]
    for port in ports:
        lines += address_lines(port)
    if docker:
        lines += ["link add docker0 type bridge forward_delay 0", "link set docker0 up"]
        lines += [f"link set {DOCKER_MEMBER} master docker0 up", f"addr add {DOCKER_ADDRESS} dev docker0"]
    return lines


def address_lines(port: Port) -> List[str]:
    own = (f"addr add {each} dev {port.iface}" + " nodad" * (":" in each) for each in port.addresses)
    return [f"link set {port.iface} up", *own]


Cut = Tuple[str, str, str]
"""A direction (`input` or `output`), the address at the other end, and what happens, in nftables' words."""


def cut_rules(cuts: Sequence[Cut]) -> str:
    """An nftables script that does to traffic what the cuts say, in place of what an earlier one did."""
    rules = ""
    for chain, side in (("input", "saddr"), ("output", "daddr")):
        rules += f"chain {chain} {{ type filter hook {chain} priority 0; policy accept;\n"
        for way, address, action in cuts:
            if way == chain:
                family = "ip6" if ":" in address else "ip"
                tcp = "meta l4proto tcp " if "tcp" in action else ""
                rules += f"{family} {side} {address} {tcp}{action}\n"
        rules += "}\n"
    return f"table inet ringlab\ndelete table inet ringlab\ntable inet ringlab {{\n{rules}}}\n"


# --- the files of SSH: keys, an sshd_config per host, and one client configuration for all ---

SSHD_CONFIG = """\
Port 22
{listen}
HostKey {dir}/host_key
AuthorizedKeysFile {top}/client_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PrintMotd no
PidFile none
GatewayPorts clientspecified
LogLevel INFO
"""

CLIENT_COMMON = """\
Host *
    User root
    BatchMode yes
    StrictHostKeyChecking yes
    UserKnownHostsFile {top}/known_hosts
    GlobalKnownHostsFile /dev/null
    UpdateHostKeys no
    IdentitiesOnly yes
    IdentityAgent none
    PreferredAuthentications publickey
    ConnectTimeout 10
    KexAlgorithms curve25519-sha256
    LogLevel ERROR
"""

CLIENT_ENTRY = """\
Host {patterns}
    HostName {address}
    HostKeyAlias {alias}
    IdentityFile {top}/{key}
"""

HOSTS_FILE = """\
127.0.0.1 localhost
127.0.1.1 {name}
::1 localhost ip6-localhost ip6-loopback
"""


def make_key(path: Path) -> str:
    sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path))
    kind, key = path.with_suffix(".pub").read_text().split()[:2]
    return f"{kind} {key}"


def write_host(top: Path, name: str, addresses: Sequence[str], chroot: bool = False) -> None:
    """Write the directory of one host: sshd's files, and those that are bound over /etc and /proc in it.

    With `chroot`, a login sees the folder `root` in that directory as its root file system.
    """
    directory = top / name
    directory.mkdir()
    public = make_key(directory / "host_key")
    with (top / "known_hosts").open("a") as known:
        known.write(f"{name} {public}\n")
    listen = "\n".join(f"ListenAddress {address}" for address in addresses)
    config = SSHD_CONFIG.format(listen=listen, dir=directory, top=top)
    if chroot:
        config += f"ChrootDirectory {directory / 'root'}\n"
    (directory / "sshd_config").write_text(config)
    (directory / "hosts").write_text(HOSTS_FILE.format(name=name))
    (directory / "hostname").write_text(name + "\n")
    (directory / "boot_id").write_text(f"{uuid.uuid4()}\n")
    (directory / "machine-id").write_text(f"{uuid.uuid4().hex}\n")


def write_client(top: Path, addresses: Dict[str, List[str]]) -> Path:
    """Write the client's configuration and a wrapper `bin/ssh` that uses it; returns the configuration.

    A host is found by its name and by each of its addresses. Two further entries lead to the first host and
    fail: `unknownkey` (its key is not in known_hosts) and `badkey` (it does not accept our key).
    """
    text = ""
    for name, own in addresses.items():
        patterns = " ".join([name, *own])
        text += CLIENT_ENTRY.format(patterns=patterns, address=own[0], alias=name, top=top, key="client_key")
    first, own = next(iter(addresses.items()))
    for name, alias, key in (("unknownkey", "unknownkey", "client_key"), ("badkey", first, "wrong_key")):
        text += CLIENT_ENTRY.format(patterns=name, address=own[0], alias=alias, top=top, key=key)
    config = top / "ssh_config"
    config.write_text(text + CLIENT_COMMON.format(top=top))
    real = shutil.which("ssh", path=TOOL_PATH)
    if real is None:
        raise LabError("no ssh on this machine")
    wrapper = top / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real} -F {config} "$@"\n')
    wrapper.chmod(stat.S_IRWXU)
    return config
