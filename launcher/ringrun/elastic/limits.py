"""The limits of an elastic job from its options, and the error texts for exceeding them."""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.configuration.limits import Limits
from ringcomm.errors import ConfigError


@dataclass(frozen=True)
class HostLimits(Limits):
    """The limits of an elastic job, and those of its hosts. `horovod` puts Horovod's name in error texts."""

    script: str = ""  # prints the available hosts; or ""
    slots: int = 1  # of a host without a number of slots
    horovod: bool = False

    @property
    def name(self) -> str:
        """The name of the launcher in error texts that programs may search for."""
        return "Horovod" if self.horovod else "ringrun"


def check_limits(limits: HostLimits) -> HostLimits:
    """Return the limits; ConfigError names the option of one that contradicts another."""
    low, high = limits.min_np, limits.max_np
    if high is not None and high < low:
        raise ConfigError(f"--max-np {high} is less than --min-np {low}.")
    if limits.start_np < low:
        raise ConfigError(f"-np {limits.start_np} is less than --min-np {low}: the job could not start.")
    if high is not None and limits.start_np > high:
        raise ConfigError(f"-np {limits.start_np} is more than --max-np {high}.")
    return limits


def failed_text(limits: HostLimits, host: str, local: int, code: int) -> str:
    """Return the error if all ranks have failed, or all hosts are excluded. It names the first failure."""
    return (
        f"{limits.name} detected that one or more processes exited with non-zero status, thus causing the "
        "job to be terminated. The first process to do so was:\n"
        f"Process name: {host}[{local}]\nExit code: {code}"
    )


def timeout_text(limits: HostLimits, needed: int) -> str:
    """Return the error if too few slots or ranks were available in time."""
    return (
        "Timed out waiting for minimum number of slots to become available. Please check that you have "
        f"enough resources to run at least {needed} {limits.name} processes. "
        f"Timeout after {limits.timeout_s:g} seconds."
    )
