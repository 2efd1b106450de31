"""``--debug RANK``: one rank gets the terminal of ringrun, so that a debugger in it can be used.

A rank of this machine opens the terminal itself. On another host the agent makes a pseudo-terminal.
"""

from __future__ import annotations

import os
from typing import Collection, List, Mapping, NamedTuple, Optional, Sequence

from ringcomm.errors import ConfigError

from .horovod import SettingValue
from .ranks import Plan

LIMITS = ("timeout_s", "stall_warning_s", "late_after_s")
"""Settings that would end the job, or warn, while a rank stands at a breakpoint."""


class Debugged(NamedTuple):
    """The rank with the terminal.

    Attributes:
        rank: the rank.
        device: of the terminal, if the rank runs on this machine; else "".
        kind: of the terminal, for ``TERM`` on other hosts.
        columns: width of the terminal.
        rows: height of the terminal.
    """

    rank: int
    device: str
    kind: str
    columns: int
    rows: int


def without_limits(given: Collection[str]) -> List[SettingValue]:
    """Values for the time limits that the user has not set: none.

    Args:
        given: the settings that flags set.
    """
    return [SettingValue(name, "0", "--debug", "--debug") for name in LIMITS if name not in given]


def terminal_for(
    rank: Optional[int], plan: Plan, are_local: Sequence[bool], watch: bool, environ: Mapping[str, str]
) -> Optional[Debugged]:
    """The rank that gets the terminal, and facts about the terminal; None without ``--debug``.

    Args:
        rank: of ``--debug``.
        plan: the ranks.
        are_local: of every host, whether it is this machine.
        watch: whether there is a live view, which uses the terminal, too.
        environ: the launcher's environment.

    Raises:
        ConfigError: there is no such rank, or no terminal.
    """
    if rank is None:
        return None
    if watch:
        raise ConfigError("--debug and --watch both need the terminal. Use one of them.")
    if rank >= plan.size:
        raise ConfigError(f"--debug {rank}: there are the ranks 0 to {plan.size - 1}.")
    if not os.isatty(0):
        raise ConfigError(f"--debug {rank}: stdin is no terminal.")
    columns, rows = os.get_terminal_size(0)
    device = os.ttyname(0) if are_local[plan.places[rank].host_index] else ""
    if not device and not (os.isatty(1) or os.isatty(2)):
        raise ConfigError(f"--debug {rank}: neither stdout nor stderr is a terminal.")
    return Debugged(rank, device, environ.get("TERM", "dumb"), columns, rows)
