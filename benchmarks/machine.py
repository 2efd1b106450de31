"""The machine: what it is, whether it is quiet, and how much others used it meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

from peers.catalog import ROOT

Facts = Dict[str, Any]
QUIET_LOAD = 0.3
QUIET_SHARE = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def facts() -> Facts:
    """Return what a reader needs to judge the numbers.

    Not what makes this process a rank: its key is a secret.
    """
    from ringcomm.configuration.variables import MEMBERSHIP_VARIABLES

    place = {f"RINGCOMM_{name}" for name, _ in MEMBERSHIP_VARIABLES}
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cores": cores(),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "congestion": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "congestion_available": _read("/proc/sys/net/ipv4/tcp_available_congestion_control"),
        "ringcomm": _git("describe", "--always", "--dirty"),
        "settings": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("RINGCOMM_") and name not in place
        },
        "load": list(os.getloadavg()),
        "command": " ".join(["python", *sys.argv]),
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


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu_seconds() -> Tuple[float, float]:
    """Return what all programs used since boot, and what the host machine took away (steal)."""
    line = _read("/proc/stat").splitlines()[0].split()[1:]
    user, nice, system, _, _, _, _, steal = (int(value) / _TICKS for value in line[:8])
    return user + nice + system, steal


class Others:
    """Counts the cores that programs other than our own kept busy, from its creation on."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> Tuple[float, float, float, float]:
        own = sum(
            usage.ru_utime + usage.ru_stime
            for usage in (
                resource.getrusage(resource.RUSAGE_SELF),
                resource.getrusage(resource.RUSAGE_CHILDREN),
            )
        )
        return (time.monotonic(), *_cpu_seconds(), own)

    def cores(self) -> float:
        """Return how many cores' worth of time was not ours; all our children must have ended.

        Time in interrupts is left out: loopback traffic runs there, and that is ours.
        """
        now = self._now()
        elapsed, busy, stolen, own = (after - before for after, before in zip(now, self._start))
        return max(0.0, busy + stolen - own) / max(elapsed, 1e-3)


def wait_for_quiet(limit_s: float) -> Facts:
    """Wait until nothing else runs: the load average, and the processors over the last second.

    Returns:
        whether it is quiet, how long that took, and what was seen last.
    """
    started = time.monotonic()
    while True:
        others = Others()
        time.sleep(1.0)
        busy, load = others.cores(), os.getloadavg()[0]
        waited = time.monotonic() - started
        quiet = load < QUIET_LOAD * cores() and busy < QUIET_SHARE * cores()
        if quiet or waited >= limit_s:
            return {
                "quiet": quiet, "waited_s": round(waited, 1), "load": load, "others_cores": round(busy, 2)
            }  # fmt: skip


def wait_for_pause(limit_s: float) -> float:
    """Wait for a moment in which the processors are idle (the load average still counts our own last run).

    Returns:
        how many cores others kept busy at the end.
    """
    deadline = time.monotonic() + limit_s
    while True:
        others = Others()
        time.sleep(0.25)
        busy = others.cores()
        if busy < QUIET_SHARE * cores() or time.monotonic() >= deadline:
            return busy


def noise_line(quiet: Facts, others: List[float], when: str = "during") -> str:
    """One sentence that says how far the numbers can be trusted."""
    seen = sorted(others) or [0.0]
    middle, most = seen[len(seen) // 2], seen[-1]
    line = f"Other programs used {middle:.2f} cores {when} the median run and {most:.2f} {when} the worst"
    if not quiet["quiet"]:
        start = f"at the start the load was {quiet['load']:.2f} after {quiet['waited_s']} s of waiting"
        return f"**NOT QUIET**: {start}. {line}."
    if middle > QUIET_SHARE * cores():
        return f"**NOT QUIET**: it was when the run began, but later it was not. {line}."
    return f"Quiet: load {quiet['load']:.2f} at the start. {line}."
