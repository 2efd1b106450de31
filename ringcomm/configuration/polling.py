"""How long a waiting call polls on this machine before it sleeps."""

from __future__ import annotations

import os
from typing import Iterable, Tuple

from ..config import Settings

_CROWDED = 5.0  # factor of the polling time where ranks outnumber cores


def polling_s(settings: Settings, local_size: int) -> float:
    """Return how long a waiting call polls before it sleeps, in seconds.

    Polling yields the processor at each round, so it keeps no rank from working where ranks outnumber cores.
    There a longer time pays: 4 ranks on 2 cores exchange 8 bytes in half the time of sleeping.
    """
    spin_s = settings.spin_us * 1e-6
    return spin_s if local_size <= usable_cores() else _CROWDED * spin_s


def own_cores() -> Tuple[int, int]:
    """Return the lowest core that this process may run on, and the number of such cores."""
    try:
        cores = os.sched_getaffinity(0)  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, OSError):  # not Linux, or refused
        return 0, os.cpu_count() or 1
    return min(cores), len(cores)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return own_cores()[1]


def cores_together(cores: Iterable[Tuple[int, int]]) -> int:
    """Return how many cores processes of a host have together, each given by :func:`own_cores`.

    Bound processes have either the same cores or disjoint ones.

    >>> cores_together([(0, 2)] * 3), cores_together([(0, 1), (1, 1), (1, 1)])
    (2, 2)
    """
    return sum(count for _, count in set(cores))
