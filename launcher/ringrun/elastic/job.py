"""An elastic job as data: a job to which hosts and processes are added while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Dict, Tuple

from ..plan import horovod
from ..plan.hosts import HostSpec
from ..plan.job import HostJob, Job
from ..plan.ranks import Place, Plan, PlannedHost
from .limits import HostLimits


@dataclass(frozen=True)
class ElasticJob(Job):
    """An elastic job. ``plan.places`` are its processes by member number, ``hosts`` its agents; `specs` are
    the hosts that the user has listed, and empty if a script names them.
    """

    limits: HostLimits = field(default_factory=HostLimits)
    specs: Tuple[HostSpec, ...] = ()
    maker: Any = None

    @property
    def is_elastic(self) -> bool:
        return True

    @property
    def all_local(self) -> bool:
        """False: hosts of other machines may be added at any time."""
        return False

    @classmethod
    def of(cls, job: Job, limits: HostLimits, specs: Tuple[HostSpec, ...], maker: Any) -> ElasticJob:
        """Return an elastic job with the fields of a job, which has no hosts yet."""
        common = {item.name: getattr(job, item.name) for item in fields(job)}
        return cls(**common, limits=limits, specs=specs, maker=maker)

    def fresh(self) -> ElasticJob:
        """Return the same job before its start."""
        return replace(self, plan=Plan([], []), hosts=[])

    def open_host(self, agent: int, spec: HostSpec, slots: int, is_local: bool) -> HostJob:
        """Add a host, whose agent has the next number, for up to `slots` processes; ConfigError if an option
        for this host is not valid.
        """
        planned = PlannedHost(spec, slots, slots)
        host: HostJob = self.maker.make(agent, planned, is_local)
        hosts, planned_hosts = self.hosts, self.plan.hosts
        assert isinstance(hosts, list) and isinstance(planned_hosts, list) and len(hosts) == agent
        hosts.append(host)
        planned_hosts.append(planned)
        return host

    def add_member(self, member: int, agent: int, local: int, rank: int, size: int) -> Dict[str, Any]:
        """Add a process with the next number `member` in the slot `local`, and return what its agent needs to
        start it. `rank` and `size` are a guess; only Horovod's variables contain them.
        """
        places = self.plan.places
        assert isinstance(places, list) and len(places) == member
        host = self.hosts[agent]
        place = Place(member, agent, local, host.planned.slots, agent, len(self.hosts))
        places.append(place)
        env = {} if not self.horovod else _horovods(place._replace(rank=rank), size, host.name)
        env = {name: value for name, value in env.items() if name not in host.env}
        env.update(RINGCOMM_SLOT=f"{agent}:{local}", RINGCOMM_ELASTIC="1", RINGCOMM_MEMBER=str(member))
        return {"rank": member, "env": env}

    def agent_config(self, host: HostJob) -> Dict[str, Any]:
        """Return the first message to a host's agent; processes are started later."""
        config = super().agent_config(host)
        config["env"]["RINGCOMM_SIZE"] = str(self.limits.start_np)
        return {**config, "elastic": True, "slots": host.planned.slots}


def _horovods(place: Place, size: int, host: str) -> Dict[str, str]:
    """Return Horovod's variables at the start of the process."""
    return {**horovod.rank_variables(place, size, host), "HOROVOD_ELASTIC": "1"}
