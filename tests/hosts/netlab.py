"""Several hosts on one machine: namespaces, each with its own interfaces, hostname, hosts file and sshd.

A `Lab` is a star. A namespace of its own holds two bridges, `lan` and `wlan`; every host has an interface on
each (`eth0` at full speed, `wlan0` at 20 Mbit/s), and so has the root namespace, which is host number 0,
"localhost". Each host also has a `docker0` with the address that all others' have too. The bridges are not in
the root namespace, so that its firewall does not see what hosts send each other, and so that its own link can
be shaped, unplugged and counted like any other.

    with Lab("jetson1", Host("jetson2", eth="enp3s0")) as lab:
        subprocess.run([*lab.ssh_command.split(), "jetson1", "hostname"], check=True)

Only one process uses a lab. Make it in a thread that outlives it: the hosts end when that thread does
(PR_SET_PDEATHSIG), which is also why nothing runs on after a SIGKILL. What a killed process leaves
(namespaces, links, files) goes when the next lab starts.

What a host does not have of its own: files (all hosts see this machine's, like NFS, but for a few in /etc;
a login on a host with a `root` sees that root file system, with changes of its own),
cgroups, /dev/pts, and the clock. It has no default route.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, List, Sequence, Set, Tuple, Union

import psutil

from tests.hosts import netlab_plan as plans
from tests.hosts import netlab_system as system
from tests.hosts.netlab_plan import LOCALHOST, Host, Port
from tests.hosts.netlab_system import LabError, ip, ip_batch, sh, wait_for

__all__ = ["LOCALHOST", "Host", "Lab", "LabError", "wait_for"]

TIED = ("setpriv", "--pdeathsig", "KILL")
WLAN_RATE = ("20mbit", "64kb", "50ms")
OTHER_WAY = {"input": "output", "output": "input"}
WAYS = ("input", "output")


@dataclass
class Running:
    """A started host: what holds it up, how many sockets its sshd opens, its PID 1 (seen from here)."""

    holder: subprocess.Popen[bytes]
    listeners: int
    init: int = 0
    namespace: int = 0


class Lab:
    """A set of hosts, made by `start` (or `with`) and removed by `close`; see the module's text. An interface
    is given by its name or its role.
    """

    def __init__(
        self, *hosts: Union[str, Host], ipv6_only: bool = False, no_wlan: bool = False, docker: bool = True,
        bridged: bool = False,
    ) -> None:  # fmt: skip
        wlan = None if no_wlan else "wlan0"
        self.hosts = [
            host if isinstance(host, Host) else Host(host, wlan=wlan, ipv6_only=ipv6_only)
            for host in hosts or ("jetson1", "jetson2")
        ]
        names = {host.name for host in self.hosts if re.fullmatch(r"[a-z0-9-]+", host.name)}
        if len(names - {LOCALHOST, "switch"}) != len(self.hosts):
            raise ValueError(f"bad or repeated host names: {[host.name for host in self.hosts]}")
        self.docker, self.bridged = docker, bridged
        self.number = 0
        self._ports: Dict[Tuple[str, str], Port] = {}
        self._cuts: Dict[FrozenSet[str], Tuple[str, Sequence[str], str]] = {}
        self._unplugged: Set[Port] = set()
        self._shaped: Set[Port] = set()
        self._lock: int | None = None
        self._docker_lock: int | None = None
        self._owner = 0
        self._running: Dict[str, Running] = {}

    unavailable = staticmethod(system.unavailable)

    # --- life ---

    def start(self) -> Lab:
        """Make the hosts and wait until each one's sshd listens; removes everything again when that fails."""
        system.cleanup_stale()
        self.number, self._lock = system.acquire()
        self._owner = os.getpid()
        atexit.register(self.close)
        try:
            self._build()
            self.boot(*(host.name for host in self.hosts))
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End every host and remove everything that the lab made. Harmless when repeated or forked."""
        if self._lock is None or self._owner != os.getpid():
            return
        for name in list(self._running):
            self._end(name)
        system.remove(self.number)
        if self._docker_lock is not None:
            system.unlock(self._docker_lock)
            self._docker_lock = None
            system.drop_docker()
        system.release(self.number, self._lock)
        self._lock = None
        atexit.unregister(self.close)

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.close()

    def boot(self, *names: str) -> None:
        """Start hosts (after `start` only those that were killed) and wait until their sshd listens."""
        for name in names:
            self._running[name] = self._start_host(name)
        for name in names:
            wait_for(partial(self._up, name, self._running[name]), 20, f"sshd on {name}")

    def kill_host(self, host: str) -> None:
        """SIGKILL everything on a host at once. `boot` starts it again.

        Its kernel lives on and closes the connections, so that peers see an end of stream or a reset at once;
        for a loss of power `cut` or `unplug` it first.
        """
        running = self._running[host]
        os.kill(running.init, signal.SIGKILL)
        running.holder.wait(timeout=10)
        wait_for(lambda: not system.alive_in(running.namespace), 10, f"the end of {host}")

    def restore(self) -> None:
        """Undo every fault, end what still runs on the hosts, and boot those that were killed."""
        self._cuts.clear()
        self._apply_cuts()
        for port in list(self._unplugged):
            self.plug(port.host, port.role)
        for port in list(self._shaped):
            self.unshape(port.host, port.role)
        for name, host in self._running.items():
            if host.holder.poll() is None:
                for pid, _ in self.processes(name):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                wait_for(partial(lambda each: not self.processes(each), name), 10, f"no processes on {name}")
        self.boot(*(name for name, host in self._running.items() if host.holder.poll() is not None))

    # --- building ---

    @property
    def directory(self) -> Path:
        """Where the lab's files are: keys, configurations, one directory with sshd.log per host."""
        return system.RUN_DIR / str(self.number)

    def _build(self) -> None:
        self._ports = plans.plan(self.number, self.hosts)
        switch = plans.switch_of(self.number)
        for name in (switch, *(str(plans.netns_of(self.number, host.name)) for host in self.hosts)):
            sh("ip", "netns", "add", name)
            if Path("/proc/sys/net/ipv6").exists():  # no second of waiting for duplicates of an address
                system.in_netns(name, "sh", "-c", "echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad")
        if self.docker:
            self._docker_lock = system.hold_docker()
        own_docker = self._docker_lock is not None
        ip_batch(switch, plans.bridge_lines())
        ip_batch(None, plans.root_lines(self.number, self._ports, own_docker, self.bridged))
        ip_batch(switch, plans.switch_lines(self._ports, self.docker, own_docker))
        for host in self.hosts:
            own = self._own_ports(host.name)
            ip_batch(own[0].netns, plans.host_lines(own, self.docker))
        for port in self._ports.values():
            if port.role == "wlan":
                self._tbf(port, *WLAN_RATE)
        self._write_files()

    def _write_files(self) -> None:
        self.directory.mkdir(mode=0o700)
        for name in ("client_key", "wrong_key"):
            plans.make_key(self.directory / name)
        addresses = {host.name: self.addresses(host.name) for host in self.hosts}
        for host in self.hosts:
            plans.write_host(self.directory, host.name, addresses[host.name], chroot=bool(host.root))
        plans.write_client(self.directory, addresses)

    def _start_host(self, name: str) -> Running:
        sshd = shutil.which("sshd", path=system.TOOL_PATH) or "sshd"
        home = self.directory / name
        inside = ["nsenter", f"--net=/run/netns/{plans.netns_of(self.number, name)}"]
        inside += ["unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child"]
        (root,) = (host.root for host in self.hosts if host.name == name)
        inside += ["sh", "-c", plans.INIT, "init", str(home), sshd, root]
        with (home / "sshd.log").open("ab") as log:
            holder = subprocess.Popen(
                [*TIED, *inside], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                env=system.tool_env(), preexec_fn=system.interruptible,
                start_new_session=True,  # no Ctrl-C of ours: the hosts end when they are closed
            )  # fmt: skip
        return Running(holder, len(self.addresses(name)))

    def _up(self, name: str, host: Running) -> bool:
        """Return whether a host's sshd listens on all its addresses; LabError when the host has ended."""
        if host.holder.poll() is not None:
            raise LabError(f"host {name} ended: {(self.directory / name / 'sshd.log').read_text()}")
        if not host.init:
            children = psutil.Process(host.holder.pid).children()
            host.init = children[0].pid if children else 0
            host.namespace = system.pid_namespace(host.init)
        return bool(host.init) and system.listening(host.init, 22) >= host.listeners

    def _end(self, name: str) -> None:
        host = self._running.pop(name)
        if host.init and host.holder.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.kill(host.init, signal.SIGKILL)  # everything in its pid namespace with it
                host.holder.wait(timeout=5)
        host.holder.kill()  # PID 1, if it is there, follows (--kill-child)
        host.holder.wait()
        with contextlib.suppress(LabError):
            wait_for(lambda: not system.alive_in(host.namespace), 5, f"the end of {name}")

    # --- looking ---

    def iface(self, host: str, role: str = "eth") -> str:
        return self._port(host, role).iface

    def addresses(self, host: str, role: str | None = None) -> List[str]:
        """A host's addresses in the lab, those of eth first, without link-local ones and docker0's."""
        ports = [port for port in self._own_ports(host) if role in (None, port.role)]
        return [address.partition("/")[0] for port in ports for address in port.addresses]

    @property
    def ssh_config(self) -> Path:
        """An ssh client configuration that reaches every host from the root namespace, by name or address."""
        return self.directory / "ssh_config"

    @property
    def ssh_command(self) -> str:
        return f"ssh -F {self.ssh_config}"

    def environ(self) -> Dict[str, str]:
        """This process's environment, with a PATH on which plain `ssh` uses the lab's configuration."""
        return {**os.environ, "PATH": os.pathsep.join([str(self.directory / "bin"), system.TOOL_PATH])}

    def counters(self, host: str) -> Dict[str, Tuple[int, int]]:
        """{interface: (bytes received, bytes sent)} of a host, of "localhost", or of "switch" (near ends).

        An idle interface counts a few hundred bytes of IPv6 housekeeping, so compare with a threshold. For
        "localhost" the interfaces of other labs, which come and go, are left out.
        """
        netns = plans.switch_of(self.number) if host == "switch" else self._port(host, "eth").netns
        foreign = re.compile(rf"rl(?!{self.number}[a-z])\d+[a-z]m?")
        stats = {
            link["ifname"]: link["stats64"]
            for link in system.ip_json(netns, "-s", "link", "show")
            if not foreign.fullmatch(link["ifname"])
        }
        return {name: (each["rx"]["bytes"], each["tx"]["bytes"]) for name, each in stats.items()}

    def processes(self, host: str) -> List[Tuple[int, str]]:
        """(pid as seen from here, command line) of what runs on a host, without zombies and its PID 1.

        Nothing runs on an idle host: PID 1 is the sshd that listens, and a login shows as further sshd's,
        which end a moment after their client. For "localhost": everything in this process's own pid
        namespace, so nothing that runs on the other hosts.
        """
        if host == LOCALHOST:
            return system.alive_in(system.pid_namespace(os.getpid()))
        running = self._running[host]
        return [entry for entry in system.alive_in(running.namespace) if entry[0] != running.init]

    def pid_namespace(self, host: str) -> int:
        """Return what identifies a host's processes, also after its end: see `netlab_system.alive_in`."""
        return self._running[host].namespace

    # --- cables ---

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
        """Return what sends over a cable in this direction of the host: options of `tc`, and the device."""
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
        port = self._port(host, iface)
        self._unplugged.discard(port)
        ip(plans.switch_of(self.number), "link", "set", port.near, "up")

    # --- running ---

    def command(self, host: str, argv: Sequence[str], cwd: Union[str, Path] | None = None) -> List[str]:
        """The argv that runs `argv` on a host from here. It dies with its starter, by SIGKILL.

        A signal sent to the resulting process does not reach the command: take its pid from `processes`.
        """
        start = ["sh", "-c", 'cd -- "$0" && exec "$@"', str(cwd or Path.cwd()), *argv]
        if host == LOCALHOST:
            return [*TIED, *start]
        enter = ["nsenter", "-t", str(self._running[host].init), "-n", "-u", "-m", "-p", "-i", "--"]
        return [*TIED, *enter, *TIED, *start]

    def run(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` on a host; by default checked, as text, captured, and for 60 s at most."""
        options = {"check": True, "timeout": 60, **options}
        if not {"capture_output", "stdout", "stderr"} & set(options):
            options["capture_output"] = True
        return subprocess.run(*self._with_defaults(host, argv, options), **options)

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(*self._with_defaults(host, argv, options), **options)

    def _with_defaults(self, host: str, argv: Sequence[str], options: Dict[str, Any]) -> List[List[str]]:
        """Fill in the options of a process on a host, and return its command line."""
        command = self.command(host, argv, options.pop("cwd", None))
        options.update({"text": True, "preexec_fn": system.interruptible, **options})
        options["env"] = system.tool_env(options.get("env"))
        return [command]
