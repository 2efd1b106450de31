"""The addresses of this machine."""

from __future__ import annotations

from typing import Iterable, List, Set

from ringrun.plan.hosts import HostSpec
from ringrun.reach import local


def get_local_host_addresses() -> Set[str]:
    """Every address of every interface of this machine."""
    return {str(address) for address in local.own_addresses()}


def filter_local_addresses(all_host_names: Iterable[str]) -> List[str]:
    """The hosts that are not this machine.

    Args:
        all_host_names: names or addresses.
    """
    names = list(all_host_names)
    are_local = local.find_local([HostSpec(name) for name in names])
    return [name for name, is_local in zip(names, are_local) if not is_local]
