"""Chooses how each host of a job is reached."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import List, Mapping, Optional, Sequence

from ringcomm.errors import ConfigError

from ..plan import hostlist
from ..plan.allocations import Allocation, find_allocation
from ..plan.hosts import HostSpec
from ..plan.reaching import Reach
from .local import ThisMachine, find_local
from .slurm import Srun
from .ssh import Ssh, SshOptions
from .via import Via

SCONTROL_LIMIT_S = 20.0


class Doors:
    """The ways to the hosts of one job.

    Args:
        via: the template that the user has given, ``ssh`` for ssh also inside a scheduler's job, or None.
        ssh: how to log in; options of ssh that the user has given take precedence over a scheduler's way.
        allocation: the surrounding job of a scheduler, if there is one.

    Raises:
        ConfigError: the template cannot be used.
    """

    def __init__(self, via: Optional[str], ssh: SshOptions, allocation: Optional[Allocation]) -> None:
        self._here = ThisMachine()
        self._allocation = allocation
        self._ssh = Ssh(ssh, may_appear=allocation is not None and allocation.may_appear)
        self._via = Via(via) if via is not None and via != "ssh" else None
        self._inside: Optional[Srun] = None
        if allocation is not None and allocation.job and via is None and ssh == SshOptions():
            self._inside = Srun(allocation.job)

    def of(self, spec: HostSpec, is_local: bool) -> Reach:
        """The way to a host.

        Args:
            spec: the host.
            is_local: whether it is this machine.
        """
        return self._here if is_local else self._remote(spec)

    def _remote(self, spec: HostSpec) -> Reach:
        if self._via is not None:
            return self._via
        if self._inside is not None and self._allocation is not None and self._allocation.has(spec):
            return self._inside
        return self._ssh

    def in_clear(self) -> List[str]:
        """A line if this job's key reaches hosts by a way of the scheduler that does not encrypt it."""
        if self._inside is None or self._allocation is None:
            return []
        return [
            f"the hosts of {self._allocation.title} get this job's key by {self._inside.description}, which "
            "does not encrypt it: a process that reads the network while the job starts can join the job, in "
            "spite of --encrypt. --via ssh sends it inside ssh."
        ]

    def find_local(self, specs: Sequence[HostSpec]) -> List[bool]:
        """Return whether each host is this machine; see :func:`.local.find_local`."""
        here = self._allocation.here if self._allocation is not None else ""
        names = [here] if here else []
        return find_local(
            specs, more_names=names, by_name=lambda spec: not isinstance(self._remote(spec), Ssh)
        )


def allocation_of(environ: Mapping[str, str], needed: bool) -> Optional[Allocation]:
    """The surrounding job of a scheduler, or None.

    Args:
        environ: the launcher's environment.
        needed: whether the job's hosts come from it. Otherwise an allocation that cannot be read counts as
            none: variables and files of a job that is over may be left.

    Raises:
        ConfigError: a variable or a file of the scheduler cannot be understood.
    """
    try:
        return find_allocation(environ, read_text, _expand)
    except ConfigError:
        if needed:
            raise
        return None


def read_text(what: str, path: str) -> str:
    """The content of a file that the user or a scheduler names; ``what`` it is, for the error.

    Raises:
        ConfigError: it cannot be read, or is not a text in UTF-8.
    """
    try:
        # "sig": editors on Windows write a byte order mark first.
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise ConfigError(f"The {what} {path} cannot be read: {problem.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The {what} {path} is not a text file in UTF-8.") from None


def _expand(text: str) -> List[str]:
    """The names in a list of Slurm's nodes; scontrol expands what this program cannot."""
    try:
        return hostlist.expand(text)
    except ConfigError:
        found = _hostnames(text)
        if found is None:
            raise
        return found.split()


def _hostnames(text: str) -> Optional[str]:
    """Slurm's own expansion of a list of nodes; None if it fails."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text], capture_output=True, text=True, check=True,
            timeout=SCONTROL_LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
