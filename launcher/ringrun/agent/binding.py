# ruff: noqa: PTH118
"""The processors that each rank of a host may use (``--bind``).

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`.
"""

from __future__ import annotations

import os
import re
from typing import Dict, List, NamedTuple, Set, Tuple

NONE, CORE, SOCKET, CACHE = "none", "core", "socket", "cache"
UNKNOWN = -1
NO_CACHES = "the system does not report which cores share a cache"


class Processor(NamedTuple):
    """One logical processor.

    Attributes:
        number: as the system counts them.
        core: its core; the processors of one core share its arithmetic.
        socket: its chip.
        capacity: its speed relative to the fastest, up to 1024, on processors with unlike cores.
        cache: the lowest number of the processors with which it shares the last level of cache, or UNKNOWN.
    """

    number: int
    core: int
    socket: int
    capacity: int
    cache: int = UNKNOWN


_Core = List[Processor]


def shares(policy: str, processors: List[Processor], ranks: int) -> List[Set[int]]:
    """The processors of each rank. Pure.

    Args:
        policy: ``core``: every rank has cores of its own, as many and as fast as the others', if there are
            enough; ``cache``: also cores of their own, of as few groups that share a cache as have one for
            every rank; ``socket``: ranks share sockets in turns; ``none``.
        processors: those that the job may use.
        ranks: the number of ranks on this host.

    Returns:
        For each rank the numbers of its processors; an empty set if it is not bound.
    """
    if policy == NONE or not processors:
        return [set() for _ in range(ranks)]
    if policy == SOCKET:
        sockets = sorted({item.socket for item in processors})
        return [
            {item.number for item in processors if item.socket == sockets[rank % len(sockets)]}
            for rank in range(ranks)
        ]
    cores: Dict[Tuple[int, int], _Core] = {}
    for item in processors:
        cores.setdefault((item.socket, item.core), []).append(item)
    if ranks > len(cores):
        return [set() for _ in range(ranks)]
    if policy == CACHE and _caches_reported(processors):
        return _within_caches(list(cores.values()), ranks)
    return _assigned(list(cores.values()), ranks, len(cores) // ranks)


def _assigned(cores: List[_Core], ranks: int, count: int) -> List[Set[int]]:
    """So many cores for each rank."""
    # Equal capacities keep neighbours together, which share caches. Unequal cores are assigned one by one.
    order = sorted(cores, key=lambda core: (-core[0].capacity, core[0].socket, core[0].core))
    if len({core[0].capacity for core in order}) == 1:
        picked = [order[rank * count : (rank + 1) * count] for rank in range(ranks)]
    else:
        picked = [order[rank : count * ranks : ranks] for rank in range(ranks)]
    return [{item.number for core in mine for item in core} for mine in picked]


def _within_caches(cores: List[_Core], ranks: int) -> List[Set[int]]:
    """Equally many cores for each rank, all of one cache, and all ranks on the least number of caches."""
    by_cache: Dict[int, List[_Core]] = {}
    for core in cores:
        by_cache.setdefault(core[0].cache, []).append(core)
    groups = sorted(by_cache.values(), key=len, reverse=True)
    least = next(number for number in range(1, len(groups) + 1) if sum(map(len, groups[:number])) >= ranks)
    fastest = sorted(groups, key=lambda group: -sum(core[0].capacity for core in group) / len(group))[:least]
    chosen = fastest if sum(map(len, fastest)) >= ranks else groups[:least]
    counts = range(max(map(len, chosen)), 0, -1)
    count = next(count for count in counts if sum(len(group) // count for group in chosen) >= ranks)
    found: List[Set[int]] = []
    for group in chosen:
        found += _assigned(group, min(len(group) // count, ranks - len(found)), count)
    return found


def _caches_reported(processors: List[Processor]) -> bool:
    return all(item.cache != UNKNOWN for item in processors)


def usable_shares(policy: str, ranks: int) -> Tuple[List[Set[int]], str]:
    """The processors of each rank of this host, as far as the system lets a process choose them.

    Args:
        policy: as for :func:`shares`.
        ranks: the number of ranks on this host.

    Returns:
        As :func:`shares`; and why ranks are not bound as the policy demands, or "".
    """
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
    if policy == CACHE and not why and not _caches_reported(processors):
        return found, NO_CACHES
    return ([set() for _ in range(ranks)] if why else found), why


def describe(host: str, why: str) -> str:
    """One line for the user about a host whose ranks are not bound as demanded; "" for an empty reason.

    Args:
        host: its name.
        why: the second result of :func:`usable_shares`.
    """
    effect = "binds as --bind core" if why == NO_CACHES else "has no effect"
    return f"--bind {effect} on {host}: {why}" if why else ""


def available_processors(root: str = "/sys/devices/system/cpu") -> List[Processor]:
    """The processors that this process may use; empty where the system does not say."""
    try:
        numbers = sorted(os.sched_getaffinity(0))  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, OSError):  # not Linux, or refused
        return []
    found = []
    for number in numbers:
        folder = os.path.join(root, f"cpu{number}")
        found.append(
            Processor(
                number,
                _number(os.path.join(folder, "topology", "core_id"), number),
                _number(os.path.join(folder, "topology", "physical_package_id"), 0),
                _number(os.path.join(folder, "cpu_capacity"), 1024),
                _last_cache(os.path.join(folder, "cache")),
            )
        )
    return found


def _last_cache(folder: str) -> int:
    """The lowest number of the processors that share the last level of cache, or UNKNOWN."""
    try:
        last = max(range(8), key=lambda index: _number(os.path.join(folder, f"index{index}", "level"), 0))
        with open(os.path.join(folder, f"index{last}", "shared_cpu_list"), encoding="ascii") as file:
            return int(re.split("[-,]", file.read())[0])
    except (OSError, ValueError):
        return UNKNOWN


def _number(path: str, default: int) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default
