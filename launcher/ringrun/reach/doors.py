"""Chooses how each host of a job is reached."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import List, Mapping, Optional, Sequence

from ringcomm.errors import ConfigError

from ..plan.allocations import Allocation, expand, find_allocation
from ..plan.hosts import HostSpec
from ..plan.reaching import Reach
from .local import ThisMachine, find_local
from .slurm import Srun
from .ssh import Ssh, SshOptions
from .via import Via

SCONTROL_LIMIT_S = 20.0


class Doors:
    """The ways to the hosts of one job: `via` is a template, ``ssh`` for ssh also inside a scheduler's job,
    or None. Options of ssh that the user gave take precedence over a scheduler's way. ConfigError if the
    template is not valid.
    """

    def __init__(
        self, via: Optional[str], ssh: SshOptions, allocation: Optional[Allocation],
        joined: Optional[Mapping[str, Reach]] = None,
    ) -> None:  # fmt: skip
        self._here, self._joined = ThisMachine(), joined or {}
        self._allocation = allocation
        self._ssh = Ssh(ssh, may_appear=allocation is not None and allocation.may_appear)
        self._via = Via(via) if via is not None and via != "ssh" else None
        self._inside: Optional[Srun] = None
        if allocation is not None and allocation.job and via is None and ssh == SshOptions():
            self._inside = Srun(allocation.job)

    def of(self, spec: HostSpec, is_local: bool) -> Reach:
        """Return the way to a host."""
        return self._here if is_local else self._remote(spec)

    def _remote(self, spec: HostSpec) -> Reach:
        if spec.name in self._joined:
            return self._joined[spec.name]
        if self._via is not None:
            return self._via
        if self._inside is not None and self._allocation is not None and self._allocation.has(spec):
            return self._inside
        return self._ssh

    def in_clear(self) -> List[str]:
        """Return a line if the scheduler's way to the hosts does not encrypt this job's key."""
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
        found = find_local(
            specs, more_names=names, by_name=lambda spec: not isinstance(self._remote(spec), Ssh)
        )
        return [is_local and spec.name not in self._joined for spec, is_local in zip(specs, found)]


def allocation_of(environ: Mapping[str, str], needed: bool) -> Optional[Allocation]:
    """Return the surrounding job of a scheduler, or None. ConfigError if it cannot be parsed; unless `needed`
    for hosts, it then counts as none: a finished job may have left variables and files.
    """
    try:
        return find_allocation(environ, read_text, _expand)
    except ConfigError:
        if needed:
            raise
        return None


def read_text(what: str, path: str) -> str:
    """Return the content of a UTF-8 file of the user or a scheduler; ConfigError names it by `what`."""
    try:
        # "sig": editors on Windows write a byte order mark first.
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise ConfigError(f"The {what} {path} cannot be read: {problem.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The {what} {path} is not a text file in UTF-8.") from None


def _expand(text: str) -> List[str]:
    """Return the names in a node list of Slurm; scontrol expands lists that this program cannot."""
    try:
        return expand(text)
    except ConfigError:
        found = _hostnames(text)
        if found is None:
            raise
        return found.split()


def _hostnames(text: str) -> Optional[str]:
    """Return Slurm's expansion of a node list; None if it fails."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text], capture_output=True, text=True, check=True,
            timeout=SCONTROL_LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
