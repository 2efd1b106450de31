"""``--debug RANK``: one rank gets the terminal of ringrun, so that a debugger in it can be used."""

from __future__ import annotations

import os
from typing import Collection, List, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError

from .horovod import SettingValue
from .ranks import Plan

LIMITS = ("timeout_s", "stall_warning_s", "late_after_s")
"""Settings that would end the job, or warn, while a rank stands at a breakpoint."""


def without_limits(given: Collection[str]) -> List[SettingValue]:
    """Values for the time limits that the user has not set: none.

    Args:
        given: the settings that flags set.
    """
    return [SettingValue(name, "0", "--debug", "--debug") for name in LIMITS if name not in given]


def terminal_for(
    rank: Optional[int], plan: Plan, are_local: Sequence[bool], watch: bool
) -> Optional[Tuple[int, str]]:
    """The rank and the device of the terminal that it gets; None without ``--debug``.

    Args:
        rank: of ``--debug``.
        plan: the ranks.
        are_local: of every host, whether it is this machine.
        watch: whether there is a live view, which uses the terminal, too.

    Raises:
        ConfigError: there is no such rank on this machine, or no terminal.
    """
    if rank is None:
        return None
    if watch:
        raise ConfigError("--debug and --watch both need the terminal. Use one of them.")
    if rank >= plan.size:
        raise ConfigError(f"--debug {rank}: there are the ranks 0 to {plan.size - 1}.")
    host = plan.hosts[plan.places[rank].host_index]
    if not are_local[plan.places[rank].host_index]:
        raise ConfigError(
            f"--debug {rank}: rank {rank} runs on {host.spec.name}, and only a rank of this machine can have "
            "its terminal. Name this machine first, or run ringrun there."
        )
    if not os.isatty(0):
        raise ConfigError(f"--debug {rank}: stdin is no terminal.")
    return rank, os.ttyname(0)
