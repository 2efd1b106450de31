"""From options to a finished job: what the command line and :func:`ringrun.function.run_function` share.

Nothing here handles signals, prints or exits, so that it works in threads and notebooks.
"""

from __future__ import annotations

import os
import resource
import secrets
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ringcomm.certificate import make_certificate
from ringcomm.errors import ConfigError
from ringcomm.transport.nics import InterfaceFilter

from ..diagnosis.failure_report import ranks_text
from ..plan import horovod, setting_sources
from ..plan.command import Command, parse_command, with_interpreter
from ..plan.environment import forwarded, horovods_variables, not_forwarded, own_variables
from ..plan.horovod import Said
from ..plan.hosts import HostSpec, parse_hostfile, parse_hosts
from ..plan.job import HostJob, Job
from ..plan.ranks import Plan, make_plan
from ..plan.setting_sources import Effective
from ..reach.local import find_local
from ..reach.protocol import BOOT
from ..reach.ssh import SshOptions, ssh_argv
from ..show.console import Console
from .outcome import Outcome
from .rendezvous import rendezvous_for
from .supervise import Supervisor

SPARE_FILES = 64
"""What a process has open besides its connections to ranks."""


@dataclass(frozen=True)
class Options:
    """What can be said about a job, as ``ringrun --help`` explains it.

    ``pythons``, ``cwds`` and ``ifaces`` are ``[HOST=]VALUE`` each; ``said`` is what flags say about the
    settings. With ``one_each`` every host runs one rank, however many slots it has.
    """

    np: Optional[int] = None
    hosts: Optional[str] = None
    hostfile: Optional[str] = None
    forward: Tuple[str, ...] = ()
    pythons: Tuple[str, ...] = ()
    cwds: Tuple[str, ...] = ()
    ifaces: Tuple[str, ...] = ()
    output_dir: Optional[str] = None
    restarts: int = 0
    one_each: bool = False
    said: Tuple[Said, ...] = ()
    config_file: Optional[str] = None
    horovod: bool = False
    ssh: SshOptions = SshOptions()
    verbose: bool = False


def prepare(
    options: Options, command: Sequence[str], environ: Optional[Mapping[str, str]] = None,
    payload: Optional[bytes] = None, local_env: Optional[Mapping[str, str]] = None,
) -> Job:  # fmt: skip
    """Put a job together. Names are looked up to find which hosts are this machine; no host is contacted.

    Args:
        command: the ranks' command line.
        environ: the launcher's environment (``os.environ``).
        payload: for the ranks to read, in addition to their arguments.
        local_env: more variables for the ranks on this machine.

    Raises:
        ConfigError: an option makes no sense; one paragraph says which and what would.
    """
    environ = os.environ if environ is None else environ
    parsed = parse_command(command)
    plan = make_plan(options.np, read_hosts(options))
    names = [host.spec.name for host in plan.hosts]
    pythons = per_host("--python", options.pythons, names)
    cwds = per_host("--cwd", options.cwds, names)
    ifaces = per_host("--iface", options.ifaces, names)
    settings = effective_settings(options, environ, ifaces).settings
    common = {**own_variables(settings, environ), **forwarded(options.forward, environ)}
    if options.horovod:
        common = {**horovods_variables(environ), **common, **horovod.counted(environ)}
    hosts: List[HostJob] = []
    are_local = find_local([host.spec for host in plan.hosts])
    _refuse_aliases(plan, are_local)
    _check_open_files(plan.size)
    for index, (planned, is_local) in enumerate(zip(plan.hosts, are_local)):
        spec = planned.spec
        chosen = spec.python or pythons.get(spec.name) or pythons.get(None)
        python = chosen or sys.executable
        if is_local:
            python = str(Path(python).expanduser())
        cwd = spec.cwd or cwds.get(spec.name) or cwds.get(None) or _working_directory(environ)
        env = dict(common)
        iface = spec.iface or ifaces.get(spec.name)
        if iface:
            InterfaceFilter(iface)
            env["RINGCOMM_IFACE"] = iface
        if is_local:
            env.update(local_env or {})
        argv = [python, "-c", BOOT] if is_local else ssh_argv(spec, python, options.ssh)
        own = with_interpreter(parsed, None if chosen else _found_python(parsed, environ))
        hosts.append(HostJob(index, planned, is_local, python, cwd, own, env, tuple(argv)))
    return Job(
        id=secrets.token_hex(8), key=secrets.token_bytes(32), plan=plan, hosts=tuple(hosts),
        settings=settings, command=parsed, version=own_version(), payload=payload, horovod=options.horovod,
        output_dir=None if options.output_dir is None else Path(options.output_dir),
        certificate=make_certificate() if settings.encrypt else "",
        notes=tuple(not_forwarded(options.forward, environ)),
    )  # fmt: skip


def _refuse_aliases(plan: Plan, are_local: Sequence[bool]) -> None:
    """One machine under two names would be two hosts, whose ranks look for each other on the network."""
    here = [host for host, is_local in zip(plan.hosts, are_local) if is_local]
    if len(here) > 1:
        names = " and ".join(host.spec.name for host in here)
        raise ConfigError(
            f"{names} are one machine: this one. Name it once, with the number of its ranks, like "
            f"{here[0].spec.name}:{sum(host.used for host in here)}."
        )


def _check_open_files(size: int) -> None:
    """Every rank holds a connection to every other, and the launcher one to each."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and size + SPARE_FILES > most:
        raise ConfigError(
            f"{size} ranks: each keeps a connection to every other, but a process may have only {most} files "
            "open here (`ulimit -n`). Ask for fewer ranks, or raise that limit on every host."
        )


def read_hosts(options: Options) -> List[HostSpec]:
    """The hosts that ``-H`` or ``--hostfile`` name; none means this machine.

    Raises:
        ConfigError: both are given, the file cannot be read, or an item is malformed.
    """
    if options.hosts is not None and options.hostfile is not None:
        raise ConfigError("-H and --hostfile are both given. Name the hosts in one way.")
    specs: List[HostSpec] = []
    if options.hosts is not None:
        specs = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        specs = parse_hostfile(_read("hostfile", options.hostfile), options.hostfile)
    if options.one_each:
        specs = list({spec.target.lower(): spec._replace(slots=1) for spec in specs}.values())
    return specs


def _read(what: str, path: str) -> str:
    try:
        # "sig": editors on Windows put a mark in front.
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise ConfigError(f"The {what} {path} cannot be read: {problem.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The {what} {path} is not a text file in UTF-8.") from None


def per_host(option: str, values: Sequence[str], hosts: Sequence[str]) -> Dict[Optional[str], str]:
    """``[HOST=]VALUE`` options by host; None is the key of the one for all hosts.

    Raises:
        ConfigError: a host is not in the list, has two values, or a value is empty.
    """
    found: Dict[Optional[str], str] = {}
    for text in values:
        left, equals, right = text.partition("=")
        host: Optional[str] = None
        value = text
        if equals and "/" not in left:
            host, value = left, right
            if host not in hosts:
                raise ConfigError(f"{option} {text}: {host!r} is not among the hosts ({', '.join(hosts)}).")
        if not value:
            raise ConfigError(
                f"{option} {text!r} has no value. Write {option} VALUE, or {option} HOST=VALUE."
            )
        if host in found:
            whom = "all hosts" if host is None else host
            raise ConfigError(
                f"{option} is given twice for {whom}: {found[host]} and {value}. Keep one of them."
            )
        found[host] = value
    return found


def effective_settings(
    options: Options, environ: Mapping[str, str], ifaces: Optional[Mapping[Optional[str], str]] = None
) -> Effective:
    """The settings that a job with these options would have, and where each comes from.

    Args:
        ifaces: the interfaces by host, if they are known already; None is the key of the one for all.

    Raises:
        ConfigError: one of them makes no sense, or the configuration file cannot be read.
    """
    if ifaces is None:
        names = [planned.spec.name for planned in make_plan(options.np, read_hosts(options)).hosts]
        ifaces = per_host("--iface", options.ifaces, names)
    flags = list(options.said)
    if None in ifaces:
        flags.append(Said("iface", ifaces[None], f"--iface {ifaces[None]}", "--iface"))
    if options.verbose:
        flags.append(Said("verbose", "1", "--verbose", "--verbose"))
    path = options.config_file
    file = [] if path is None else setting_sources.from_file(_read("configuration file", path), path)
    others = horovod.from_environment(environ) if options.horovod else []
    variables = setting_sources.from_environment(environ)
    found = setting_sources.effective([file, others, variables, setting_sources.once(flags)])
    InterfaceFilter(found.settings.iface)  # refuses what is no network, before it does so on every host
    return found


def _working_directory(environ: Mapping[str, str]) -> str:
    """Where we are, by the name the user knows it under: that is the one that may exist elsewhere."""
    try:
        real, named = Path.cwd(), environ.get("PWD", "")
        return named if named.startswith("/") and real.samefile(named) else str(real)
    except OSError:
        raise ConfigError("The current directory does not exist any more. Change to another one.") from None


def _found_python(command: Command, environ: Mapping[str, str]) -> Optional[str]:
    """What the word ``python`` means here; None if that is the interpreter that runs ringrun."""
    if command.word is None:
        return None
    found = shutil.which(command.word, path=environ.get("PATH"))
    if found is None or Path(found).absolute().parent == Path(sys.executable).parent:
        return None
    return str(Path(found).absolute())


def own_version() -> str:
    """ringcomm's version here."""
    from ringcomm.version import __version__

    return __version__


def launch(
    job: Job, console: Optional[Console] = None, environ: Optional[Mapping[str, str]] = None,
    started: Optional[Callable[[Supervisor], None]] = None,
) -> Outcome:  # fmt: skip
    """Run a job to its end, in this thread.

    Args:
        console: where the output goes; None for ``sys.stdout`` and ``sys.stderr``.
        started: is given the supervisor, whose ``interrupt`` other threads may call.
    """
    console = Console() if console is None else console
    coloured = console.coloured(os.environ if environ is None else environ)
    supervisor = Supervisor(job, console, rendezvous_for(job), coloured)
    if started is not None:
        started(supervisor)
    return supervisor.run()


def describe(job: Job) -> str:
    """The plan and the command lines, for ``--dry-run``. No secret is in it."""
    plan: Plan = job.plan
    lines = [f"{_count(plan.size, 'rank')} on {_count(len(plan.hosts), 'host')}:"]
    for host in job.hosts:
        ranks = ranks_text([place.rank for place in plan.on_host(host.index)])
        how = "this machine, no ssh" if host.is_local else "ssh"
        lines.append(f"  {host.name} ({how}): {ranks}, {_count(host.planned.slots, 'slot')}")
        words = [host.python if word is None else word for word in host.command.argv]
        lines.append(f"    in {host.cwd}: {' '.join(shlex.quote(word) for word in words)}")
        if host.env:
            lines.append(f"    with {', '.join(sorted(host.env))} in its environment")
        lines.append(f"    started by: {' '.join(shlex.quote(word) for word in host.argv)}")
    return "\n".join(lines) + "\n"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
