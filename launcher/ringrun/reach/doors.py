"""Chooses how each host of a job is reached."""

from __future__ import annotations

import getpass
import socket
import threading
from pathlib import Path
from typing import Callable, Dict, FrozenSet, List, Mapping, Optional, Sequence

from ringcomm.configuration.membership import Numeric, numeric
from ringcomm.errors import ConfigError

from ..plan.hosts import Allocation, HostSpec, find_allocation
from .base import Reach, Srun, Ssh, SshOptions, ThisMachine, Via

LOOKUP_LIMIT_S = 2.0
"""Time limit of name resolution, in seconds. After it the host counts as remote: ssh reports the error."""


class Doors:
    """The ways to the hosts of one job: `via` is a template, or ``ssh`` also inside a scheduler's job."""

    def __init__(
        self, via: Optional[str], ssh: SshOptions, allocation: Optional[Allocation],
        joined: Optional[Mapping[str, Reach]] = None,
    ) -> None:  # fmt: skip
        self._here, self._joined, self._allocation = ThisMachine(), joined or {}, allocation
        self._ssh = Ssh(ssh, may_appear=allocation is not None and allocation.may_appear)
        self._via = Via(via) if via is not None and via != "ssh" else None
        by_srun = allocation is not None and allocation.job and via is None and ssh == SshOptions()
        self._inside = Srun(allocation.job) if allocation is not None and by_srun else None

    def of(self, spec: HostSpec, is_local: bool) -> Reach:
        """Return the way to a host."""
        return self._here if is_local else self._remote(spec)

    def _remote(self, spec: HostSpec) -> Reach:
        if spec.name in self._joined:
            return self._joined[spec.name]
        if self._inside is not None and self._allocation is not None:
            return self._inside if spec.name in [host.name for host in self._allocation.hosts] else self._ssh
        return self._via or self._ssh

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
        """Return whether each host is this machine; see :func:`find_local`."""
        names = [] if self._allocation is None else [self._allocation.here]
        by_name = lambda spec: not isinstance(self._remote(spec), Ssh)  # noqa: E731
        found = find_local(specs, more_names=names, by_name=by_name)
        return [is_local and spec.name not in self._joined for spec, is_local in zip(specs, found)]


def allocation_of(environ: Mapping[str, str], needed: bool) -> Optional[Allocation]:
    """Return the surrounding job of a scheduler, or None. ConfigError if it cannot be parsed; unless `needed`
    for hosts, it then counts as none: a finished job may have left variables and files.
    """
    try:
        return find_allocation(environ, read_text)
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


# -- whether a host is this machine: then its ranks start without ssh ------------------------------
# This machine's host name is compared as text only: its address is not usable (Debian maps it to 127.0.1.1).
# The name that the user gave is resolved, and its addresses are compared with this machine's.


def is_own_name(name: str, hostname: str) -> bool:
    """Return whether a name is this machine's host name or a name of the loopback, by text. Pure."""
    given, own = name.lower().rstrip("."), hostname.lower().rstrip(".")
    if given in ("localhost", "localhost.localdomain", own):
        return True
    # The first label of this machine's name matches. A longer name than this machine's may be another host.
    return bool(given) and "." not in given and given == own.split(".")[0]


def own_addresses() -> FrozenSet[Numeric]:
    """Return every address of every interface of this machine."""
    from ringcomm.transport.nics import listed

    found = (numeric(address) for _, address, _ in listed())
    return frozenset(address for address in found if address is not None)


def find_local(
    specs: Sequence[HostSpec], more_names: Sequence[str], by_name: Callable[[HostSpec], bool]
) -> List[bool]:
    """Return whether each host is this machine; names are resolved in parallel. A host with another user
    before the @ counts as remote, because its ranks need a login. `more_names` are further names of this
    machine; `by_name` tells whether a host's name alone decides, as for containers, whose names are not in
    the network.
    """
    hostname, user, own = socket.gethostname(), own_user(), own_addresses()

    def is_named(spec: HostSpec) -> bool:
        return spec.name in more_names or is_own_name(spec.name, hostname)

    wanted = {spec.name for spec in specs if not is_named(spec) and not by_name(spec)}
    answers: Dict[str, List[Numeric]] = {}
    threads = [threading.Thread(target=_look_up, args=(name, answers), daemon=True) for name in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LOOKUP_LIMIT_S)
    return [
        spec.user in (None, user)
        and (is_named(spec) or any(item in own or item.is_loopback for item in answers.get(spec.name, ())))
        for spec in specs
    ]


def _look_up(name: str, answers: Dict[str, List[Numeric]]) -> None:
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # it may be an alias in ssh's configuration; otherwise ssh reports the error
    answers[name] = [address for row in rows if (address := numeric(str(row[4][0]))) is not None]


def own_user() -> str:
    """Return this user's name, or ""."""
    try:
        return getpass.getuser()
    except (KeyError, ImportError, OSError):
        return ""  # a container's uid without a name
