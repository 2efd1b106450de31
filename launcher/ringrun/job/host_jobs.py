"""The part of a job on one host, from the options: interpreter, directory, variables, command lines."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence

from ringcomm.errors import ConfigError
from ringcomm.transport.nics import InterfaceFilter

from ..plan.command import Command, in_tree, with_interpreter
from ..plan.hosts import HostSpec
from ..plan.job import HostJob
from ..plan.ranks import PlannedHost
from ..reach.doors import Doors
from ..reach.environments import finder
from ..ship.package import own_package

ANY_PYTHON = "python3"
"""The interpreter of a host that lacks the one that runs ringrun."""


class HostMaker:
    """Makes the part of a job on each host. Of `pythons`, `cwds` and `ifaces` the key None is for all hosts;
    `env` is for all ranks, `local_env` for ranks on this machine, `shell` (the launching shell's variables)
    for ranks on other hosts. Without `ship_self` hosts need the same version of ringcomm; `shipped` is the
    directory that is sent to other hosts, or None.
    """

    def __init__(
        self, command: Command, environ: Mapping[str, str], doors: Doors, env: Mapping[str, str],
        local_env: Mapping[str, str], pythons: Mapping[Optional[str], str], cwds: Mapping[Optional[str], str],
        ifaces: Mapping[Optional[str], str], ship_self: bool = True,
        shipped: Optional[Path] = None, shell: Optional[Mapping[str, str]] = None,
    ) -> None:  # fmt: skip
        self._shipped, self._shell = shipped, shell or {}
        self._command, self._environ, self.doors = command, environ, doors
        self._env, self._local_env, self._ship_self = env, local_env, ship_self
        self._pythons, self._cwds, self._ifaces = pythons, cwds, ifaces

    def find_local(self, specs: Sequence[HostSpec]) -> List[bool]:
        """Return whether each host is this machine."""
        return self.doors.find_local(specs)

    def variables(self, is_local: bool) -> Dict[str, str]:
        """Return the variables of a host's ranks, in addition to the host's own environment."""
        return {**self._env, **self._local_env} if is_local else {**self._shell, **self._env}

    def make(self, index: int, planned: PlannedHost, is_local: bool) -> HostJob:
        """Return the part of the job on one host; ConfigError if an option for this host is not valid."""
        spec = planned.spec
        chosen = spec.python or self._pythons.get(spec.name) or self._pythons.get(None)
        named = _found_python(self._command, self._environ)
        # On another host the agent runs with the named interpreter, too: it may be at another path there.
        python = chosen or (named if named and not is_local else sys.executable)
        if is_local:
            python = str(Path(python).expanduser())
        cwd = spec.cwd or self._cwds.get(spec.name) or self._cwds.get(None)
        reach = self.doors.of(spec, is_local)
        env = self.variables(is_local) if is_local or reach.gets_shell else dict(self._env)
        iface = spec.iface or self._ifaces.get(spec.name)
        if iface:
            InterfaceFilter(iface)
            env["RINGCOMM_IFACE"] = iface
        own = with_interpreter(self._command, named if is_local and not chosen else None)
        gets_code = not is_local and not cwd
        if gets_code and self._shipped is not None:
            own = in_tree(own, self._shipped, Path(working_directory(self._environ)))
        package = own_package().digest if self._ship_self and not (is_local and _is_own(python)) else ""
        other = () if is_local or chosen else tuple(reach.argv(spec, ANY_PYTHON))
        return HostJob(
            index, planned, is_local, reach, python, cwd or working_directory(self._environ), own, env,
            tuple(reach.argv(spec, python)), other, package, gets_code=gets_code,
            finder=finder(python, os.path.expanduser("~")) if other else b"",  # noqa: PTH111
        )  # fmt: skip


def _is_own(python: str) -> bool:
    """Return whether a path is that of the interpreter that runs ringrun. Links are not resolved: they make
    virtual environments.
    """
    return os.path.abspath(python) == os.path.abspath(sys.executable)  # noqa: PTH100


def per_host(option: str, values: Sequence[str], hosts: Optional[Sequence[str]]) -> Dict[Optional[str], str]:
    """Return ``[HOST=]VALUE`` options by host; the key None has the value for all hosts. ConfigError for an
    unlisted host (`hosts` None: any is permitted), two values of one host, or an empty value.
    """
    found: Dict[Optional[str], str] = {}
    for text in values:
        left, equals, right = text.partition("=")
        host: Optional[str] = None
        value = text
        if equals and "/" not in left:
            host, value = left, right
            if hosts is not None and host not in hosts:
                raise ConfigError(f"{option} {text}: {host!r} is not among the hosts ({', '.join(hosts)}).")
        if not value:
            raise ConfigError(
                f"{option} {text!r} has no value. Write {option} VALUE, or {option} HOST=VALUE."
            )
        if host in found:
            target = "all hosts" if host is None else host
            raise ConfigError(
                f"{option} is given twice for {target}: {found[host]} and {value}. Keep one of them."
            )
        found[host] = value
    return found


def working_directory(environ: Mapping[str, str]) -> str:
    """Return the current directory as in ``PWD``, with links: other hosts more likely have that path."""
    try:
        real, named = Path.cwd(), environ.get("PWD", "")
        return named if named.startswith("/") and real.samefile(named) else str(real)
    except OSError:
        raise ConfigError("The current directory no longer exists. Change to another one.") from None


def _found_python(command: Command, environ: Mapping[str, str]) -> Optional[str]:
    """Return the path of the command ``python`` here; None if that is the interpreter that runs ringrun."""
    if command.word is None:
        return None
    found = shutil.which(command.word, path=environ.get("PATH"))
    if found is None or Path(found).absolute().parent == Path(sys.executable).parent:
        return None
    return str(Path(found).absolute())
