# ruff: noqa: PTH109, PTH110, PTH112, PTH118, PTH208
"""The program of one host for ``ringrun doctor``: facts, and the network as a job sees it. Runs on the host.

It needs no package there: :mod:`ringrun.doctor.hosts` sends this file and its imports. After :data:`MARKER`,
each line on stdin is a command as JSON, and each line on stdout its answer. The program ends when stdin does.

A host listens, dials and measures by :class:`~ringcomm.rendezvous.links.LinkSetup`, as the first rank of a
job does. So it also accepts connections only after the handshake, with a key that was made for this run and
comes over stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from typing import Any, Callable, Dict, List, Optional

from ringcomm.errors import RingcommError
from ringcomm.rendezvous.links import LinkSetup
from ringcomm.transport.nics import listed_by_linux, machine, own_addresses
from ringcomm.transport.reactor import READ, Reactor, encryption_of
from ringcomm.wire.auth import job_digest
from ringrun.agent.processes import bound_cores, quotas

PACKAGES = ("numpy", "psutil", "ringcomm", "torch", "tensorflow", "keras", "jax", "mlx", "mxnet")
TOOL_LIMIT_S = 2.0
MARKER = "ringrun-doctor/3"
STDIN = 0


class Commands:
    """Answers commands until stdin ends."""

    def __init__(self) -> None:
        self._reactor = Reactor()
        self._received = b""
        self._ended = False
        self._setup: Optional[LinkSetup] = None

    def fileno(self) -> int:
        return STDIN

    def run(self) -> None:
        """Serve commands and peers."""
        self._reactor.watch(self, READ, self._read)
        try:
            while not self._ended:
                self._reactor.run_once(3600.0)
        finally:
            if self._setup is not None:
                self._setup.close()
            self._reactor.close()

    def _read(self) -> None:
        data = os.read(STDIN, 1 << 16)
        self._ended = not data
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._execute(json.loads(line.decode()))

    def _execute(self, command: Dict[str, Any]) -> None:
        do, setup = command["do"], self._setup
        if do == "facts":
            answer(collect(os.path.expanduser(command["cwd"])))  # noqa: PTH111
        elif do == "listen":
            answer(self._listen(command))
        elif do == "probe" and setup is not None:
            setup.probe(command["targets"], command["within_s"])
        elif do == "measure" and setup is not None:
            setup.measure(command["pairs"])
        else:
            raise ValueError(f"no command: {command}")

    def _listen(self, command: Dict[str, Any]) -> Dict[str, Any]:
        """Listen as a rank does; return the addresses, or why that is not possible."""
        key, encryption = bytes.fromhex(command["key"]), encryption_of(command["certificate"])
        try:
            self._setup = LinkSetup(
                self._reactor, own_addresses(command["iface"]), key, job_digest(command["job"]),
                lambda message: answer(message.get("attempts", message.get("speeds"))), encryption,
            )  # fmt: skip
        except RingcommError as problem:
            return {"problem": str(problem)}
        self._setup.assign_rank(command["rank"], 0)
        return {"addresses": self._setup.offers(), "machine": machine()}


def answer(content: Any) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


# -- facts -----------------------------------------------------------------------------------------
# Files of /sys, /proc and /etc are read below a root directory, so that recorded ones can replace them. A
# fact that this system does not have is None.


def power_modes() -> str:
    """Return the output of ``nvpmodel -q`` on a Jetson; "" elsewhere."""
    found = shutil.which("nvpmodel", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        return ""
    try:
        done = subprocess.run(
            [found, "-q"], stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")


def collect(cwd: str, root: str = "/", modes: Callable[[], str] = power_modes) -> Dict[str, Any]:
    """Return all facts: `cwd` is the ranks' directory, `root` that of the system's files."""
    return {
        "hostname": socket.gethostname(),
        "machine_id": _read(root, "/etc/machine-id"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": _packages(),
        "interfaces": interfaces(root),
        "cpu": cpu(root, modes()),
        "memory_bytes": memory(root),
        "disks": {path: _free_bytes(path) for path in (cwd, "/tmp", "/dev/shm")},
        "cwd_exists": os.path.isdir(cwd),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def _read(root: str, path: str) -> Optional[str]:
    try:
        with open(os.path.join(root, path.lstrip("/")), encoding="utf-8", errors="replace") as file:
            return file.read(65536).strip()
    except OSError:
        return None


def _packages() -> Dict[str, str]:
    """Return the packages' versions; "?" for a module of a distribution with another name (tensorflow_cpu).
    """
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # ringcomm: this program brings parts of it
            with contextlib.suppress(ImportError, ValueError):
                if name != "ringcomm" and getattr(find_spec(name), "origin", None):
                    found[name] = "?"
    return found


def interfaces(root: str) -> List[Dict[str, Any]]:
    """Return the interfaces that are up, except for the loopback, with their addresses."""
    addresses: Dict[str, List[List[Any]]] = {}
    for name, address, bits in listed_by_linux(root):
        if not address.startswith("fe80:"):
            addresses.setdefault(name, []).append([address, bits])
    try:
        names = sorted(os.listdir(os.path.join(root, "sys/class/net")))
    except OSError:
        names = []
    return [
        {
            "name": name, "mac": _read(root, f"/sys/class/net/{name}/address"),
            "addresses": addresses.get(name, []),
        }
        for name in names
        if name != "lo" and _read(root, f"/sys/class/net/{name}/operstate") != "down"
    ]  # fmt: skip


def cpu(root: str, modes: str) -> Dict[str, Any]:
    """Return cores, the quota of the control group, and the power mode of a Jetson."""
    groups = (_read(root, "/proc/self/cgroup") or "").splitlines(), os.path.join(root, "sys/fs/cgroup")
    chosen = [line for line in modes.splitlines() if line.startswith("NV Power Mode:")]
    return {
        "cores": bound_cores(),
        "all_cores": os.cpu_count(),
        "quota": min(quotas(*groups), default=None),
        "power_mode": chosen[0].partition(":")[2].strip() if chosen else None,
    }


def memory(root: str) -> Optional[int]:
    """Return the bytes of memory that are available."""
    for line in (_read(root, "/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _free_bytes(path: str) -> Optional[int]:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


def main() -> None:
    """Answer commands until stdin ends."""
    sys.stdout.write("\n" + MARKER + "\n")
    sys.stdout.flush()
    Commands().run()


if __name__ == "__main__":
    main()
