"""The options of elastic jobs, with Horovod's names and defaults. Pure."""

from __future__ import annotations

from typing import List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError

from ..plan.hosts import HostSpec
from .limits import TIMEOUT_S, Limits, check_limits


class ElasticOptions(NamedTuple):
    """The options, as given; see :class:`~.limits.Limits` for their meaning.

    Attributes:
        min_np, max_np: fewest and most ranks, or None.
        script: the discovery script, or None.
        slots: slots of hosts without a number, or None.
        reset_limit: most changes of the ranks, or None.
        timeout_s: the elastic timeout in seconds, or None.
        cooldown_s: the cooldown range in seconds, or None.
        drop: what a failure excludes, or None.
    """

    min_np: Optional[int] = None
    max_np: Optional[int] = None
    script: Optional[str] = None
    slots: Optional[int] = None
    reset_limit: Optional[int] = None
    timeout_s: Optional[float] = None
    cooldown_s: Optional[Tuple[float, float]] = None
    drop: Optional[str] = None

    @property
    def is_elastic(self) -> bool:
        """Whether they make a job elastic: a script or the fewest ranks are given."""
        return self.script is not None or self.min_np is not None


_FLAGS = {
    "max_np": "--max-np", "slots": "--slots-per-host", "reset_limit": "--reset-limit",
    "timeout_s": "--elastic-timeout", "cooldown_s": "--blacklist-cooldown-range", "drop": "--drop",
}  # fmt: skip


def limits_of(
    options: ElasticOptions, np: Optional[int], horovod: bool, environ: Mapping[str, str]
) -> Limits:
    """The limits that the options set.

    Args:
        options: the options; they make the job elastic.
        np: ``-np``: number of slots that must be available before the first start; None for the fewest ranks.
        horovod: whether ``--horovod`` is given: a failure excludes the whole host unless the options say
            otherwise, and ``HOROVOD_ELASTIC_TIMEOUT`` applies.
        environ: the launcher's environment.

    Raises:
        ConfigError: a limit is not valid.
    """
    start_np = np or options.min_np or 1
    return check_limits(
        Limits(
            start_np, options.min_np or start_np, options.max_np, options.reset_limit,
            _timeout_s(options.timeout_s, environ if horovod else {}), options.cooldown_s,
            options.drop or ("host" if horovod else "slot"), options.script or "", options.slots or 1,
            horovod,
        )
    )  # fmt: skip


def _timeout_s(given: Optional[float], environ: Mapping[str, str]) -> float:
    text = environ.get("HOROVOD_ELASTIC_TIMEOUT", "")
    if given is not None or not text:
        return TIMEOUT_S if given is None else given
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"HOROVOD_ELASTIC_TIMEOUT={text!r} is not a whole number of seconds from 1.")
    return float(int(text))


def refuse_without_effect(options: ElasticOptions) -> None:
    """Refuse options of elastic jobs if none makes the job elastic.

    Raises:
        ConfigError: one is given; the message names it.
    """
    given = [flag for name, flag in _FLAGS.items() if getattr(options, name) is not None]
    if given and not options.is_elastic:
        raise ConfigError(
            f"{given[0]} needs --min-np or --host-discovery-script: without them the number of ranks does "
            "not change."
        )


def fixed_hosts(options: ElasticOptions, np: Optional[int], specs: Sequence[HostSpec]) -> List[HostSpec]:
    """The hosts of a job without a discovery script; without a list they are this machine.

    Raises:
        ConfigError: they have fewer slots than the job needs to start.
    """
    if not specs:
        return [HostSpec("localhost", slots=np or options.max_np or options.min_np)]
    slots = options.slots or 1
    found = [spec._replace(slots=slots if spec.slots is None else spec.slots) for spec in specs]
    total, needed = sum(spec.slots or 0 for spec in found), np or options.min_np or 1
    if total < needed:
        raise ConfigError(
            f"The hosts have {total} slot{'' if total == 1 else 's'}, but the job needs {needed} to start. "
            "Give the number of slots per host, like -H a:2,b:2, or with --slots-per-host."
        )
    return found
