"""Lists of hosts and the assignment of ranks to them, with Horovod's names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError
from ringrun.plan import hosts as ringruns
from ringrun.plan.ranks import make_plan


class HostInfo:
    """A host and its number of slots.

    Args:
        hostname: its name.
        slots: its number of slots.
    """

    def __init__(self, hostname: str, slots: int) -> None:
        self.hostname = hostname
        self.slots = slots

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Parse ``host:slots``."""
        (found,) = parse_hosts(host_string)
        return found


@dataclass
class SlotInfo:
    """The place of one rank, with all of its numbers."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """The numbers, separated by commas."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, numbers))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_host_files(filename: str) -> str:
    """The hosts of a hostfile as ``host:slots,…``.

    Args:
        filename: its path.
    """
    specs = ringruns.parse_hostfile(Path(filename).read_text(encoding="utf-8"), filename)
    return ",".join(f"{spec.name}:{spec.slots or 1}" for spec in specs)


def parse_hosts_and_slots(hosts: str) -> Tuple[List[str], Dict[str, int]]:
    """Parse ``host:slots,…`` to the names in order, and the slots by name.

    Args:
        hosts: the text.

    Raises:
        ValueError: an item has another form.
    """
    specs = _specs(hosts)
    return [spec.name for spec in specs], {spec.name: spec.slots or 1 for spec in specs}


def _specs(hosts: str) -> List[ringruns.HostSpec]:
    try:
        specs = ringruns.parse_hosts(hosts)
    except ConfigError as problem:
        raise ValueError(str(problem)) from None
    if any(spec.slots is None for spec in specs):
        raise ValueError("Invalid host input, please make sure it has format as : worker-0:2,worker-1:2.")
    return specs


def parse_hosts(hosts_string: str) -> List[HostInfo]:
    """Parse ``host:slots,…`` to :class:`HostInfo` objects.

    Args:
        hosts_string: the text.
    """
    return [HostInfo(spec.name, spec.slots or 1) for spec in _specs(hosts_string)]


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: Optional[int] = None
) -> List[SlotInfo]:
    """Assign ranks to the slots of hosts, host by host.

    Args:
        hosts: the hosts.
        min_num_proc: fewest ranks.
        max_num_proc: most ranks; None for all slots.

    Raises:
        ValueError: the hosts have fewer slots than ``min_num_proc``.
    """
    specs = [ringruns.HostSpec(host.hostname, slots=host.slots) for host in hosts if host.slots]
    available = sum(host.slots for host in hosts)
    count = available if max_num_proc is None else min(available, max_num_proc)
    if count < max(1, min_num_proc):
        raise ValueError(
            f"Requested more processes ({min_num_proc}) than there are available slots ({count})"
        )
    plan = make_plan(count, specs)
    return [
        SlotInfo(
            plan.hosts[place.host_index].spec.name, place.rank, place.local_rank, place.cross_rank, count,
            place.local_size, place.cross_size,
        )
        for place in plan.places
    ]  # fmt: skip
