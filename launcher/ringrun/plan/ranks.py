"""The assignment of ranks to hosts. Pure: from hosts and a number of ranks to a :class:`Plan`."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError

from .hosts import HostSpec


def counted(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class Place(NamedTuple):
    """The position of one rank in the job and on its host."""

    rank: int
    host_index: int  # in the plan's hosts
    local_rank: int  # also its slot on the host
    local_size: int
    cross_rank: int  # its number among the ranks with this local rank, one per host
    cross_size: int  # number of hosts with this local rank


class PlannedHost(NamedTuple):
    """A host that runs at least one rank, in `used` of its `slots`."""

    spec: HostSpec
    slots: int
    used: int


class Plan(NamedTuple):
    """All ranks in rank order, and the hosts they run on in the order given."""

    hosts: Sequence[PlannedHost]
    places: Sequence[Place]

    @property
    def size(self) -> int:
        return len(self.places)

    def on_host(self, host_index: int) -> List[Place]:
        return [place for place in self.places if place.host_index == host_index]


MAX_UNSTATED = 1024
"""A single host without a number of slots gets all ranks, up to this number. More is probably an error."""


def make_plan(np: Optional[int], hosts: Sequence[HostSpec] = (), oversubscribe: bool = False) -> Plan:
    """Assign ranks to slots, host by host: `np` None means one rank per slot, no hosts mean this machine."""
    if np is not None and np < 1:
        raise ConfigError(f"-np {np}: a job has at least one rank.")
    merged = _merge(hosts) or [HostSpec("localhost")]
    slots = [1 if spec.slots is None else spec.slots for spec in merged]
    if np is not None and np > sum(slots):
        if len(merged) == 1 and merged[0].slots is None and np <= MAX_UNSTATED:
            slots = [np]
        elif oversubscribe and np <= MAX_UNSTATED:
            slots = _within_limits(np, merged, slots)
        else:
            raise ConfigError(_too_many(np, merged, slots))
    size = sum(slots) if np is None else np
    used: List[int] = []
    for available in slots:
        used.append(min(available, size - sum(used)))
    chosen = [PlannedHost(*row) for row in zip(merged, slots, used) if row[2] > 0]
    return Plan(tuple(chosen), tuple(_places([host.used for host in chosen])))


def _within_limits(np: int, hosts: Sequence[HostSpec], slots: Sequence[int]) -> List[int]:
    """Return enough slots per host, evenly, but on no host more than its ``max_slots``."""
    most = [host.max_slots or np for host in hosts]
    if sum(most) < np:
        listed = ", ".join(f"{host.target} {host.max_slots or 'any number'}" for host in hosts)
        raise ConfigError(
            f"-np {np} asks for {np} ranks, but max_slots= in the hostfile allows {sum(most)} ({listed})."
        )
    found = list(slots)
    while sum(found) < np:
        room = [index for index in range(len(found)) if found[index] < most[index]]
        found[min(room, key=lambda index: (found[index] - slots[index], index))] += 1
    return found


def _merge(hosts: Sequence[HostSpec]) -> List[HostSpec]:
    """Add up the slots of a host that is listed several times, as with MPI: ``a,a,b`` is ``a:2,b``."""
    found: Dict[Tuple[Optional[str], str], HostSpec] = {}
    for spec in hosts:
        key = (spec.user, spec.name.lower())
        if key in found:
            first = found[key]
            for name in ("port", "python", "cwd", "iface"):
                if getattr(first, name) != getattr(spec, name):
                    raise ConfigError(f"{spec.target} is listed twice with different {name}= values.")
            found[key] = first._replace(slots=(first.slots or 1) + (spec.slots or 1))
        else:
            found[key] = spec
    return list(found.values())


def _places(used: Sequence[int]) -> List[Place]:
    places: List[Place] = []
    for host_index, count in enumerate(used):
        for local in range(count):
            cross = [index for index, other in enumerate(used) if other > local]
            places.append(Place(len(places), host_index, local, count, cross.index(host_index), len(cross)))
    return places


def _too_many(np: int, hosts: Sequence[HostSpec], slots: Sequence[int]) -> str:
    total = sum(slots)
    listed = ", ".join(
        f"{spec.target} has {count}{'' if spec.slots else ' (not stated)'}"
        for spec, count in zip(hosts, slots)
    )
    # The missing slots, spread evenly over the hosts.
    more, extra = divmod(np - total, len(slots))
    enough = [count + more + (index < extra) for index, count in enumerate(slots)]
    example = ",".join(spec._replace(slots=count).item for spec, count in zip(hosts, enough))
    return (
        f"-np {np} asks for {np} ranks, but there {'is' if total == 1 else 'are'} only {total} "
        f"slot{'' if total == 1 else 's'}: {listed}. Give the number of slots per host, for example "
        f"-H {example} (in a hostfile: {hosts[0].name} slots={enough[0]}), or use fewer ranks. Several hosts "
        "are separated by commas."
    )
