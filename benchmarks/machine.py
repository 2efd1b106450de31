"""The machine: what it is, and whether it is quiet."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any, Dict

Facts = Dict[str, Any]
QUIET_LOAD = 0.3


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def facts() -> Facts:
    """Return what a reader needs to judge the numbers.

    Not what makes this process a rank: its key is a secret.
    """
    from ringcomm.configuration.membership import MEMBERSHIP_VARIABLES

    place = {f"RINGCOMM_{name}" for name, _ in MEMBERSHIP_VARIABLES}
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cores": cores(),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "congestion": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "settings": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("RINGCOMM_") and name not in place
        },
        "load": list(os.getloadavg()),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _field(path: str, name: str) -> str:
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def wait_for_quiet(limit_s: float) -> bool:
    """Wait until the load average is low; whether it is."""
    deadline = time.monotonic() + limit_s
    while os.getloadavg()[0] >= QUIET_LOAD * cores():
        if time.monotonic() >= deadline:
            return False
        time.sleep(1.0)
    return True
