"""The options of elastic jobs, with Horovod's names and defaults. Pure."""

from __future__ import annotations

from typing import List, Sequence

from ringcomm.errors import ConfigError

from ..plan.hosts import HostSpec
from ..plan.options import ELASTIC, Options, table
from .limits import HostLimits, check_limits


def limits_of(options: Options) -> HostLimits:
    """Return the limits of the options of an elastic job; ConfigError if one is not valid.

    ``-np`` is the number of slots that must be available before the first start, by default the fewest ranks.
    """
    start_np = options.np or options.min_np or 1
    return check_limits(
        HostLimits(
            start_np, options.min_np or start_np, options.max_np,
            script=options.host_discovery_script or "", slots=options.slots_per_host or 1,
            horovod=options.horovod,
        )
    )  # fmt: skip


def refuse_without_effect(options: Options) -> None:
    """Raise ConfigError for an option of elastic jobs if no option makes the job elastic."""
    elastic = [(getattr(options, item.name), row.flags[0]) for item, row in table() if row.purpose == ELASTIC]
    given = [flag for value, flag in elastic if value is not None]
    if given and not options.is_elastic:
        raise ConfigError(
            f"{given[0]} needs --min-np or --host-discovery-script: without them the number of ranks does "
            "not change."
        )


def fixed_hosts(options: Options, specs: Sequence[HostSpec]) -> List[HostSpec]:
    """Return the hosts of a job without a discovery script; without a list, this machine. ConfigError if they
    have fewer slots than the job needs to start.
    """
    if not specs:
        return [HostSpec("localhost", slots=options.np or options.max_np or options.min_np)]
    found = [spec._replace(slots=spec.slots or 1) for spec in specs]
    total, needed = sum(spec.slots or 0 for spec in found), options.np or options.min_np or 1
    if total < needed:
        raise ConfigError(
            f"The hosts have {total} slot{'' if total == 1 else 's'}, but the job needs {needed} to start. "
            "Give the number of slots per host, like -H a:2,b:2, or with --slots-per-host."
        )
    return found
