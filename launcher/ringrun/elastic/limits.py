"""The limits of an elastic job, as the options give them, and the error texts for exceeding them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

from ringcomm.configuration.limits import Limits
from ringcomm.errors import ConfigError

MIN_COOLDOWN_S, MAX_COOLDOWN_S = 1, 3600
"""The limits of ``--blacklist-cooldown-range``, in seconds."""
DROPS = ("slot", "host")
"""What a failure excludes: the slot of the failed process, or its whole host."""


@dataclass(frozen=True)
class HostLimits(Limits):
    """The limits of an elastic job, and those of its hosts.

    Attributes:
        cooldown_s: the shortest and longest exclusion of a host or slot that failed, in seconds; None: a slot
            is started again soon, and a host is excluded for the rest of the job.
        drop: what a failure excludes, one of :data:`DROPS`.
        script: the command that prints the available hosts, or "".
        slots: slots of a host for which no number is given.
        horovod: whether error texts name Horovod.
    """

    cooldown_s: Optional[Tuple[float, float]] = None
    drop: str = "slot"
    script: str = ""
    slots: int = 1
    horovod: bool = False

    @property
    def name(self) -> str:
        """The name of the launcher in error texts that programs may search for."""
        return "Horovod" if self.horovod else "ringrun"


def check_limits(limits: HostLimits) -> HostLimits:
    """The limits, if they are valid.

    Raises:
        ConfigError: a limit contradicts another, or is outside its range; the message names the option.
    """
    low, high = limits.min_np, limits.max_np
    if high is not None and high < low:
        raise ConfigError(f"--max-np {high} is less than --min-np {low}.")
    if limits.start_np < low:
        raise ConfigError(f"-np {limits.start_np} is less than --min-np {low}: the job could not start.")
    if high is not None and limits.start_np > high:
        raise ConfigError(f"-np {limits.start_np} is more than --max-np {high}.")
    if limits.drop not in DROPS:
        raise ConfigError(f"--drop {limits.drop}: the values are slot and host.")
    if limits.cooldown_s is not None:
        shortest, longest = limits.cooldown_s
        option = f"--blacklist-cooldown-range {shortest:g} {longest:g}"
        if shortest < MIN_COOLDOWN_S:
            raise ConfigError(f"{option}: the first number must be at least {MIN_COOLDOWN_S} second.")
        if longest > MAX_COOLDOWN_S:
            raise ConfigError(f"{option}: the second number must be at most {MAX_COOLDOWN_S} seconds.")
        if shortest > longest:
            raise ConfigError(f"{option}: the first number is more than the second.")
    return limits


def failed_text(limits: HostLimits, host: str, local: int, code: int) -> str:
    """The error if all ranks have failed, or all hosts are excluded.

    Args:
        limits: the job's.
        host: the host of the first process that failed.
        local: its number on that host.
        code: its exit code.
    """
    return (
        f"{limits.name} detected that one or more processes exited with non-zero status, thus causing the "
        "job to be terminated. The first process to do so was:\n"
        f"Process name: {host}[{local}]\nExit code: {code}"
    )


def timeout_text(limits: HostLimits, needed: int) -> str:
    """The error if too few slots or ranks were available for ``--elastic-timeout``.

    Args:
        limits: the job's.
        needed: how many are needed.
    """
    return (
        "Timed out waiting for minimum number of slots to become available. Please check that you have "
        f"enough resources to run at least {needed} {limits.name} processes. "
        f"Timeout after {limits.timeout_s:g} seconds."
    )
