# ruff: noqa: PTH118
"""The cores of each rank, where several share one host: the number of threads of its libraries, and the
processors that it may use (``--bind``).

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

AUTO, NONE = "auto", "none"

OPENMP = "OMP_NUM_THREADS"
FOLLOW_OPENMP = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Libraries read these first, and ``OMP_NUM_THREADS`` where they are not set."""
OTHERS = (
    "VECLIB_MAXIMUM_THREADS",  # NumPy on macOS
    "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS",
    "PJRT_NPROC", "NPROC",  # JAX; older versions read only the second
)  # fmt: skip


def limit(env: Dict[str, str], wanted: str, ranks: int, cores: Optional[float] = None) -> Dict[str, Any]:
    """Add the variables to the environment `env` of a host's ranks, except for those that are set. `wanted`
    is a number of threads per rank, :data:`NONE`, or :data:`AUTO` for an equal share of the cores between
    several ranks. Return ``threads`` per rank (0: nothing was set), ``cores``, ``ranks``, and ``kept``,
    variables set before to other values.
    """
    cores = available_cores() if cores is None else cores
    if wanted == NONE or (wanted == AUTO and ranks < 2):
        return {"threads": 0, "cores": cores, "ranks": ranks, "kept": {}}
    threads = max(1, int(cores / ranks)) if wanted == AUTO else int(wanted)
    names = [OPENMP, *OTHERS] if env.get(OPENMP) else [OPENMP, *FOLLOW_OPENMP, *OTHERS]
    known = {name: env[name] for name in [OPENMP, *FOLLOW_OPENMP, *OTHERS] if env.get(name)}
    missing = [name for name in names if name not in known]
    env.update(dict.fromkeys(missing, str(threads)))
    kept = {name: value for name, value in known.items() if value != str(threads)}
    return {"threads": threads if missing else 0, "cores": cores, "ranks": ranks, "kept": kept}


def available_cores() -> float:
    """Return the number of cores that this process may use, by its affinity and the limits of its cgroups."""
    cores = float(bound_cores())
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            limits = quotas(file.read().splitlines())
    except OSError:  # not Linux, or without cgroups
        limits = []
    return min([cores, *limits])


def bound_cores() -> int:
    """Return the number of cores in this process's affinity mask."""
    try:
        return len(os.sched_getaffinity(0))  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, OSError):  # not Linux
        return os.cpu_count() or 1


def control_groups(lines: Iterable[str], root: str = "/sys/fs/cgroup") -> List[str]:
    """Return the folders of the cgroups in ``/proc/self/cgroup`` that limit processors, and their parents."""
    found: List[str] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # version 2
            found += _with_parents(root, path)
        elif "cpu" in controllers.split(","):
            for mount in (controllers, "cpu"):
                found += _with_parents(os.path.join(root, mount), path)
    return found


def quotas(lines: Iterable[str], root: str = "/sys/fs/cgroup") -> List[float]:
    """Return the limits of :func:`control_groups`, in cores."""
    found: List[Optional[float]] = []
    for folder in control_groups(lines, root):
        old = [word for end in ("quota", "period") for word in _words(f"{folder}/cpu.cfs_{end}_us")]
        found += [_quota(_words(f"{folder}/cpu.max")), _quota(old)]
    return [quota for quota in found if quota is not None]


def _with_parents(root: str, path: str) -> List[str]:
    """Return the folders of a cgroup and its parents. In a container only the outermost may exist."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [os.path.join(root, *parts[:count]) for count in range(len(parts), -1, -1)]


def _words(path: str) -> List[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().split()
    except OSError:  # no limit is set here, or no such cgroup is visible from here
        return []


def _quota(words: List[str]) -> Optional[float]:
    """Return the cores of "200000 100000" (microseconds per period); None without a limit ("max", or -1)."""
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return None
    return int(words[0]) / int(words[1])


def describe(hosts: Mapping[str, Mapping[str, Any]], wanted: str) -> str:
    """Return one line for the user about the limits of :func:`limit` by host, or ""."""
    parts = []
    for host, found in hosts.items():
        kept = "".join(f", {name}={value} is kept" for name, value in sorted(found["kept"].items()))
        if found["threads"] and (kept or wanted == AUTO):
            cores = f"{found['cores']:.3g} core{'' if found['cores'] == 1 else 's'}"
            ranks = f"{found['ranks']} rank{'' if found['ranks'] == 1 else 's'}"
            threads = f"{found['threads']} thread{'' if found['threads'] == 1 else 's'} per rank"
            parts.append(f"{threads} on {host} ({cores}, {ranks}{kept})")
    if not parts:
        return ""
    return f"{'; '.join(parts)}. --threads N sets another number, --threads none leaves it to the libraries."


# -- --bind -----------------------------------------------------------------------------------


class Processor(NamedTuple):
    """One logical processor, by the system's number."""

    number: int
    core: int  # processors of one core share its arithmetic units
    socket: int  # the chip
    capacity: int  # speed relative to the fastest core, up to 1024


def shares(policy: str, processors: List[Processor], ranks: int) -> List[Set[int]]:
    """Return the processor numbers of each rank: disjoint sets of cores, equally many and equally fast. Sets
    are empty (not bound) for policy ``none`` and if there are fewer cores than ranks. Pure.
    """
    if policy == NONE or not processors:
        return [set() for _ in range(ranks)]
    cores: Dict[Tuple[int, int], List[Processor]] = {}
    for item in processors:
        cores.setdefault((item.socket, item.core), []).append(item)
    if ranks > len(cores):
        return [set() for _ in range(ranks)]
    count = len(cores) // ranks
    # Equal capacities keep neighbours together, which share caches. Unequal cores are assigned one by one.
    order = sorted(cores.values(), key=lambda core: (-core[0].capacity, core[0].socket, core[0].core))
    if len({core[0].capacity for core in order}) == 1:
        picked = [order[rank * count : (rank + 1) * count] for rank in range(ranks)]
    else:
        picked = [order[rank : count * ranks : ranks] for rank in range(ranks)]
    return [{item.number for core in mine for item in core} for mine in picked]


def usable_shares(policy: str, ranks: int) -> Tuple[List[Set[int]], str]:
    """Return :func:`shares` for this host, and why ranks are not bound as the policy demands, or ""."""
    processors = available_processors()
    found = shares(policy, processors, ranks)
    why = ""
    if policy != NONE and not processors:
        why = "the system does not report the processors of a process"
    elif policy != NONE and not any(found):
        why = f"there are fewer cores than its {ranks} ranks"
    elif policy != NONE:
        try:
            os.sched_setaffinity(0, [item.number for item in processors])  # type: ignore[attr-defined,unused-ignore]
        except AttributeError:
            why = "this system has no sched_setaffinity"
        except OSError as problem:
            why = f"sched_setaffinity: {problem.strerror}"
    return ([set() for _ in range(ranks)] if why else found), why


def describe_unbound(host: str, why: str) -> str:
    """Return one line for the user; "" without a reason `why`, as of :func:`usable_shares`."""
    return f"--bind has no effect on {host}: {why}" if why else ""


def available_processors(root: str = "/sys/devices/system/cpu") -> List[Processor]:
    """Return the processors that this process may use; empty where the system does not report them."""
    try:
        numbers = sorted(os.sched_getaffinity(0))  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, OSError):  # not Linux, or refused
        return []
    return [
        Processor(
            number,
            _number(f"{root}/cpu{number}/topology/core_id", number),
            _number(f"{root}/cpu{number}/topology/physical_package_id", 0),
            _number(f"{root}/cpu{number}/cpu_capacity", 1024),
        )
        for number in numbers
    ]


def _number(path: str, default: int) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default
