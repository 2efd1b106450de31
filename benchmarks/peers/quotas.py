"""Control groups that give a process a part of a core (the cpu controller of cgroups, version 1 or 2)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, List, Sequence

PERIOD_US = 10000
"""Short, so that a quota is a speed and not a rhythm."""
_FIRST = Path("/sys/fs/cgroup/cpu")
_ROOT = Path("/sys/fs/cgroup")


def path_of(name: str) -> Path:
    """The directory of a group."""
    return (_FIRST if _FIRST.is_dir() else _ROOT) / name


def limit(name: str, quota: float) -> None:
    """Give a group this part of a core."""
    path = path_of(name)
    if _FIRST.is_dir():
        (path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (path / "cpu.cfs_quota_us").write_text(str(int(quota * PERIOD_US)))
    else:
        (path / "cpu.max").write_text(f"{int(quota * PERIOD_US)} {PERIOD_US}")


def join(place: str, pid: int = 0) -> None:
    """Move a process, or this one, into a group and onto a core; a place of :class:`Groups` names both."""
    name, _, core = place.partition("@")
    (path_of(name) / "cgroup.procs").write_text(str(pid or os.getpid()))
    os.sched_setaffinity(pid, {int(core)})


def cores_of(quotas: Sequence[float], cores: Sequence[int]) -> List[int]:
    """A core for each quota: the largest quotas first, each to the emptiest core.

    Otherwise the scheduler lets two groups wait for one core while another is idle, or runs other programs.

    >>> cores_of([0.3, 0.9, 0.3], [0, 1])
    [1, 0, 1]
    """
    used = dict.fromkeys(cores, 0.0)
    found = [0] * len(quotas)
    for number in sorted(range(len(quotas)), key=lambda number: -quotas[number]):
        found[number] = min(used, key=lambda core: used[core])
        used[found[number]] += quotas[number]
    return found


class Groups:
    """A control group for each quota, while the context lasts; processes in them leave them then.

    Entering it returns the groups' places: their names, each with the core that its processes run on.

    Args:
        quotas: parts of a core.
    """

    def __init__(self, quotas: Sequence[float]) -> None:
        self._quotas = list(quotas)
        self._names = [f"ringcomm-{os.getpid()}-{number}" for number in range(len(quotas))]

    def __enter__(self) -> List[str]:
        for name, quota in zip(self._names, self._quotas):
            path_of(name).mkdir()
            limit(name, quota)
        cores = cores_of(self._quotas, sorted(os.sched_getaffinity(0)))
        return [f"{name}@{core}" for name, core in zip(self._names, cores)]

    def __exit__(self, *exception: Any) -> None:
        for name in self._names:
            for pid in (path_of(name) / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (path_of("") / "cgroup.procs").write_text(pid)
            path_of(name).rmdir()
