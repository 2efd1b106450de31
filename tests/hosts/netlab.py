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
from typing import Any, Dict, List, Sequence, Tuple, Union

from tests.hosts import netlab_plan as plans
from tests.hosts import netlab_ssh as ssh_files
from tests.hosts import netlab_system as system
from tests.hosts.netlab_cables import WLAN_RATE, Cables
from tests.hosts.netlab_plan import LOCALHOST, Host
from tests.hosts.netlab_system import LabError, ip_batch, sh, wait_for

__all__ = ["LOCALHOST", "Host", "Lab", "LabError", "wait_for"]

TIED = ("setpriv", "--pdeathsig", "KILL")


@dataclass
class Running:
    """A started host: what holds it up, how many sockets its sshd opens, its PID 1 (seen from here)."""

    holder: subprocess.Popen[bytes]
    listeners: int
    init: int = 0
    namespace: int = 0


class Lab(Cables):
    """A set of hosts, made by `start` (or `with`) and removed by `close`; see the module's text."""

    def __init__(
        self, *hosts: Union[str, Host], ipv6_only: bool = False, no_wlan: bool = False, docker: bool = True,
        bridged: bool = False,
    ) -> None:  # fmt: skip
        wlan = None if no_wlan else "wlan0"
        super().__init__([
            host if isinstance(host, Host) else Host(host, wlan=wlan, ipv6_only=ipv6_only)
            for host in hosts or ("jetson1", "jetson2")
        ])  # fmt: skip
        names = {host.name for host in self.hosts if re.fullmatch(r"[a-z0-9-]+", host.name)}
        if len(names - {LOCALHOST, "switch"}) != len(self.hosts):
            raise ValueError(f"bad or repeated host names: {[host.name for host in self.hosts]}")
        self.docker = docker
        self.bridged = bridged
        self._lock: int | None = None
        self._docker_lock: int | None = None
        self._owner = 0
        self._running: Dict[str, Running] = {}

    # --- life ---

    def start(self) -> Lab:
        """Make the hosts and wait until each one's sshd listens; removes everything again when that fails."""
        self.cleanup_stale()
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

    def __enter__(self) -> Lab:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def cleanup_stale() -> List[int]:
        """Remove what labs of dead processes have left; returns the numbers of those labs."""
        return system.cleanup_stale()

    @staticmethod
    def unavailable() -> str | None:
        """Why this machine cannot make a lab, in one line, or None when it can."""
        return system.unavailable()

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
            ssh_files.make_key(self.directory / name)
        addresses = {host.name: self.addresses(host.name) for host in self.hosts}
        for host in self.hosts:
            ssh_files.write_host(self.directory, host.name, addresses[host.name], chroot=bool(host.root))
        ssh_files.write_client(self.directory, addresses)

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
            children = [pid for pid in system.pids() if system.proc_stat(pid)[1] == host.holder.pid]
            host.init = children[0] if children else 0
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
        """The name of a host's interface; role is "eth" or "wlan"."""
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
        """`ssh -F ...`, for what takes an ssh command."""
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

    def first_process(self, host: str) -> int:
        """A host's PID 1 as seen from here: everything that starts on the host inherits from it."""
        return self._running[host].init

    def pid_namespace(self, host: str) -> int:
        """Return what identifies a host's processes, also after its end: see `netlab_system.alive_in`."""
        return self._running[host].namespace

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
        options = {"check": True, "text": True, "timeout": 60, "preexec_fn": system.interruptible, **options}
        if not {"capture_output", "stdout", "stderr"} & set(options):
            options["capture_output"] = True
        options["env"] = system.tool_env(options.get("env"))
        return subprocess.run(self.command(host, argv, options.pop("cwd", None)), **options)

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """`subprocess.Popen` on a host, as text unless told otherwise."""
        options = {"text": True, "preexec_fn": system.interruptible, **options}
        options["env"] = system.tool_env(options.get("env"))
        return subprocess.Popen(self.command(host, argv, options.pop("cwd", None)), **options)
