# ruff: noqa: PTH118
"""The processors that each rank of a host may use (``--bind``).

Standard library only: the launcher sends this file with :mod:`ringrun.agent.agent`.
"""

from __future__ import annotations

import os
from typing import Dict, List, NamedTuple, Set, Tuple

NONE = "none"


class Processor(NamedTuple):
    """One logical processor, by the system's number."""

    number: int
    core: int  # processors of one core share its arithmetic units
    socket: int  # the chip
    capacity: int  # speed relative to the fastest core, up to 1024


_Core = List[Processor]


def shares(policy: str, processors: List[Processor], ranks: int) -> List[Set[int]]:
    """Return the processor numbers of each rank: disjoint sets of cores, equally many and equally fast. Sets
    are empty (not bound) for policy ``none`` and if there are fewer cores than ranks. Pure.
    """
    if policy == NONE or not processors:
        return [set() for _ in range(ranks)]
    cores: Dict[Tuple[int, int], _Core] = {}
    for item in processors:
        cores.setdefault((item.socket, item.core), []).append(item)
    if ranks > len(cores):
        return [set() for _ in range(ranks)]
    return _assigned(list(cores.values()), ranks, len(cores) // ranks)


def _assigned(cores: List[_Core], ranks: int, count: int) -> List[Set[int]]:
    """Return `count` cores for each rank."""
    # Equal capacities keep neighbours together, which share caches. Unequal cores are assigned one by one.
    order = sorted(cores, key=lambda core: (-core[0].capacity, core[0].socket, core[0].core))
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


def describe(host: str, why: str) -> str:
    """Return one line for the user; "" without a reason `why`, as of :func:`usable_shares`."""
    return f"--bind has no effect on {host}: {why}" if why else ""


def available_processors(root: str = "/sys/devices/system/cpu") -> List[Processor]:
    """Return the processors that this process may use; empty where the system does not report them."""
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
            )
        )
    return found


def _number(path: str, default: int) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default
