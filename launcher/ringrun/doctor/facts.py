# ruff: noqa: PTH112, PTH108, PTH109, PTH110, PTH111, PTH115, PTH118, PTH208
"""Facts about one host: interfaces, processors, memory, limits, packages. Runs on the host.

Without packages: :mod:`ringrun.doctor.hosts` sends this file and its imports. Files of ``/sys``, ``/proc``
and ``/etc`` are read below a root directory, so that recorded ones can replace them. A fact that this system
does not have is None.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any, Callable, Dict, List, Optional

from ringcomm.transport.nics import listed_by_linux

from ..agent.threads import bound_cores, control_groups, quotas

PACKAGES = ("numpy", "psutil", "ringcomm", "torch", "tensorflow", "keras", "jax", "mlx", "mxnet")
TOOL_LIMIT_S = 2.0


def read(root: str, path: str) -> Optional[str]:
    """Return the content of a file below a root, stripped; None if it cannot be read."""
    try:
        with open(os.path.join(root, path.lstrip("/")), encoding="utf-8", errors="replace") as file:
            return file.read(65536).strip()
    except OSError:
        return None


def number(text: Optional[str]) -> Optional[int]:
    """Return a whole number, or None."""
    try:
        return int(text or "")
    except ValueError:
        return None


def tool_output(argv: List[str]) -> Optional[str]:
    """Return the output of a program; None if it does not exist, fails or is too slow."""
    found = shutil.which(argv[0], path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, *argv[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=TOOL_LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.decode("utf-8", "replace").strip()


Tool = Callable[[List[str]], Optional[str]]


def collect(cwd: str, root: str = "/", tool: Tool = tool_output) -> Dict[str, Any]:
    """Return all facts: `cwd` is the ranks' directory, `root` that of the system's files, `tool` runs
    programs.
    """
    return {
        "hostname": socket.gethostname(),
        "own_name": _own_name(),
        "machine_id": read(root, "/etc/machine-id"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": _packages(),
        "interfaces": interfaces(root, tool),
        "cpu": cpu(root, tool),
        "memory": memory(root),
        "disks": {path: _free_bytes(path) for path in (cwd, "/tmp", "/dev/shm")},
        "cwd_exists": os.path.isdir(cwd),
        "limits": {
            "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "ptrace_scope": number(read(root, "/proc/sys/kernel/yama/ptrace_scope")),
        },
        "threads": {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ},
        "time_s": time.time(),
    }


def _own_name() -> Optional[str]:
    try:
        return socket.gethostbyname(socket.gethostname())
    except (OSError, UnicodeError):
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


# -- network interfaces -------------------------------------------------------------------------


def interfaces(root: str, tool: Tool) -> List[Dict[str, Any]]:
    """Return the interfaces that are up, except for the loopback: names, kinds, speeds, addresses."""
    addresses: Dict[str, List[List[Any]]] = {}
    for name, address, bits in listed_by_linux(root):
        if not address.startswith("fe80:"):
            addresses.setdefault(name, []).append([address, bits])
    found = []
    for name in _listed(root, "/sys/class/net"):
        folder = f"/sys/class/net/{name}"
        if name == "lo" or read(root, f"{folder}/operstate") == "down":
            continue
        at = os.path.join(root, folder.lstrip("/"))
        wireless = os.path.exists(f"{at}/wireless") or os.path.exists(f"{at}/phy80211")
        found.append(
            {
                "name": name,
                "mac": read(root, f"{folder}/address"),
                "speed_mbit": number(read(root, f"{folder}/speed")),
                "wireless": wireless,
                "virtual": not os.path.exists(f"{at}/device"),
                "power_save": _power_save(name, tool) if wireless else None,
                "addresses": addresses.get(name, []),
            }
        )
    return found


def _power_save(name: str, tool: Tool) -> Optional[bool]:
    text = tool(["iw", "dev", name, "get", "power_save"])
    return None if text is None else text.lower().endswith("on")


# -- processors and memory ------------------------------------------------------------------------


def cpu(root: str, tool: Tool) -> Dict[str, Any]:
    """Return cores, quota, governor, temperature, load, and the power mode of a Jetson."""
    zones = "/sys/class/thermal"
    temperatures = [
        (number(read(root, f"{zones}/{zone}/temp")) or 0) / 1000.0
        for zone in _listed(root, zones)
        if zone.startswith("thermal_zone")
    ]
    load = (read(root, "/proc/loadavg") or "0").split()
    groups = (read(root, "/proc/self/cgroup") or "").splitlines(), os.path.join(root, "sys/fs/cgroup")
    return {
        "cores": bound_cores(),
        "all_cores": os.cpu_count(),
        "quota": min(quotas(*groups), default=None),
        "throttled": _throttled(control_groups(*groups)),
        "governor": read(root, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "mhz": [
            number(read(root, f"/sys/devices/system/cpu/cpu0/cpufreq/{name}"))
            for name in ("scaling_max_freq", "cpuinfo_max_freq")
        ],
        "hottest": max(temperatures, default=None),
        "load": float(load[0]),
        "waited": _waited(root),
        "power_mode": _power_mode(tool(["nvpmodel", "-q"])),
    }


def _listed(root: str, path: str) -> List[str]:
    try:
        return sorted(os.listdir(os.path.join(root, path.lstrip("/"))))
    except OSError:
        return []


def _throttled(folders: List[str]) -> float:
    """Return the share of its periods in which a control group was throttled after using up its quota."""
    shares = [0.0]
    for folder in folders:
        rows = [line.split() for line in (read(folder, "cpu.stat") or "").splitlines()]
        counts = {row[0]: number(row[1]) or 0 for row in rows if len(row) == 2}
        if counts.get("nr_periods"):
            shares.append(counts.get("nr_throttled", 0) / counts["nr_periods"])
    return max(shares)


def _waited(root: str) -> Optional[float]:
    """Return the share of its time in which this process was ready to run and had no processor."""
    words = (read(root, "/proc/self/schedstat") or "").split()
    if len(words) < 2 or not int(words[0]):
        return None
    ran, waited = int(words[0]), int(words[1])
    return waited / (ran + waited)


def _power_mode(text: Optional[str]) -> Optional[str]:
    """Return the name of the power mode in the output of ``nvpmodel -q``."""
    for line in (text or "").splitlines():
        if line.startswith("NV Power Mode:"):
            return line.partition(":")[2].strip()
    return None


def memory(root: str) -> Dict[str, Optional[int]]:
    """Return the bytes of memory and swap."""
    rows = dict(
        line.split(":", 1) for line in (read(root, "/proc/meminfo") or "").splitlines() if ":" in line
    )
    names = {"total": "MemTotal", "available": "MemAvailable", "swap": "SwapTotal", "swap_free": "SwapFree"}
    found: Dict[str, Optional[int]] = {}
    for name, key in names.items():
        kib = number(rows.get(key, "").strip().split(" ")[0])
        found[name] = None if kib is None else kib * 1024
    return found


def _free_bytes(path: str) -> Optional[int]:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize
