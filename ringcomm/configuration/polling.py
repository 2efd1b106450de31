"""How long a waiting call polls on this machine before it sleeps."""

from __future__ import annotations

import os
from typing import Iterable, Tuple

from ..config import Settings

_CROWDED = 5.0
"""How many times as long to poll where ranks outnumber cores."""


def polling_s(settings: Settings, local_size: int) -> float:
    """Return how long a waiting call polls before it sleeps.

    Between two looks it gives the processor away. So where ranks outnumber cores polling keeps no rank from
    working, and as a rank must wait for its turn there anyway, it is worth polling longer: 4 ranks on 2
    cores exchange 8 bytes in half the time that it takes if they sleep.
    """
    spin_s = settings.spin_us * 1e-6
    return spin_s if local_size <= usable_cores() else _CROWDED * spin_s


def own_cores() -> Tuple[int, int]:
    """Return the lowest number of the processor cores that this process may run on, and how many they are."""
    try:
        cores = os.sched_getaffinity(0)  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, OSError):  # not Linux, or refused
        return 0, os.cpu_count() or 1
    return min(cores), len(cores)


def usable_cores() -> int:
    """Return how many processor cores this process may run on."""
    return own_cores()[1]


def cores_together(cores: Iterable[Tuple[int, int]]) -> int:
    """Return how many cores processes of a host have together.

    Args:
        cores: of each process what :func:`own_cores` returns: those that have been bound have either the same
            cores or other ones.

    >>> cores_together([(0, 2)] * 3), cores_together([(0, 1), (1, 1), (1, 1)])
    (2, 2)
    """
    return sum(count for _, count in set(cores))
