"""From options to a job that is ready to run, for the command line and for :func:`ringrun.function.run`.

This module does not handle signals, print or exit, so that it works in threads and notebooks.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ringcomm.configuration.settings import Effective, SettingValue, effective, values_in
from ringcomm.errors import ConfigError
from ringcomm.storage.keys import make_certificate
from ringcomm.transport.nics import InterfaceFilter
from ringcomm.version import __version__

from ..diagnosis.first_failure import ranks_text
from ..elastic.job import ElasticJob, fixed_hosts, limits_of, refuse_without_effect
from ..plan.environment import (
    forwarded,
    horovod_counted,
    horovod_settings,
    horovod_without_effect,
    not_forwarded,
    of_the_shell,
    own_variables,
    rows_of,
)
from ..plan.hosts import Allocation, HostSpec, parse_hostfile, parse_hosts, refuse_many_launchers
from ..plan.job import Command, HostJob, Job, in_tree, parse_command, with_interpreter
from ..plan.options import Options
from ..plan.ranks import Plan, PlannedHost, counted, make_plan
from ..reach.base import Doors, Reach, allocation_of, read_text
from ..reach.named_hosts import lists_in, with_lists
from ..reach.protocol import finder
from .files import SourceTree, own_package, position

SLOW_S = 2.0  # after which a line names the slow step


def prepare(
    options: Options, command: Sequence[str], environ: Optional[Mapping[str, str]] = None,
    payload: Optional[bytes] = None, local_env: Optional[Mapping[str, str]] = None,
    joined: Sequence[Tuple[HostSpec, Reach]] = (), say: Callable[[str], None] = lambda text: None,
) -> Job:  # fmt: skip
    """Return a job made from options. Host names are resolved to find this machine; no host is contacted.
    `local_env` has more variables for ranks on this machine; `joined` are the machines that the options
    invite; `say` gets a line, in another thread, if counting files takes long.
    """
    environ = os.environ if environ is None else environ
    refuse_without_effect(options)
    refuse_many_launchers(environ)
    guests, known, port = invited(options)
    if len(joined) != guests + len(known):
        raise ConfigError("Machines join with a code only when a job is started by the command ringrun.")
    parsed = parse_command(command)
    allocation = allocation_of(environ, needed=needs_hosts(options))
    plan = _plan(options, allocation, [spec for spec, _ in joined])
    by_host = _by_host(options, plan)
    found = effective_settings(options, environ, by_host["iface"])
    settings = found.settings
    env = {**own_variables(settings, environ), **forwarded(options.forward, environ)}
    if options.horovod:
        env.update(horovod_counted(environ))
    doors = Doors(options, allocation, {spec.name: reach for spec, reach in joined})
    maker = HostMaker(
        parsed, environ, doors, by_host, env, local_env or {},
        {} if options.no_env else of_the_shell(environ), options.ship_self,
        None if options.ship is None else Path(options.ship),
    )  # fmt: skip
    tree, code_at = _tree(options, environ, parsed, say)
    specs = [] if plan is None else [host.spec for host in plan.hosts]
    are_local = doors.find_local(specs)
    remote = (spec.name for spec, is_local in zip(specs, are_local) if not is_local)
    public = "" if "encrypt" in found.sources else doors.public_host(remote)
    notes = _notes(options, environ, allocation, public)
    if joined and "encrypt" in found.sources and not settings.encrypt:
        notes.append("jobs that machines join are encrypted, in spite of --no-encrypt")
    encrypts = settings.encrypt or bool(joined or public)  # machines that join may be anywhere, and relayed
    job = Job(
        id=secrets.token_hex(8), key=secrets.token_bytes(32), plan=Plan([], []), hosts=[],
        settings=settings, command=parsed, version=__version__,
        output_dir=None if options.output_dir is None else Path(options.output_dir),
        payload=payload, horovod=options.horovod,
        notes=(*notes, *(doors.in_clear() if encrypts else [])),
        certificate=_certificate(public) if encrypts else "", port=port,
        joining=joined[0][1].takes if joined else None,
        provision=options.provision, tree=tree,
        # Inside a scheduler's job the agent may have fewer cores than the ranks get.
        checks_slots=allocation is None and not options.oversubscribe
        and (options.np is None or options.is_elastic),
        code_at=code_at, folder=secrets.token_hex(8), fetch=_with_folders(options.fetch), bind=options.bind,
        watch=options.watch, report=_report(options.report),
        setting_rows=tuple(rows_of(found)), grace_s=options.grace_s,
    )  # fmt: skip
    if options.is_elastic:
        needs_private = not encrypts and "encrypt" not in found.sources
        limits = limits_of(options)
        return ElasticJob(
            **vars(job), limits=limits, specs=tuple(specs), maker=maker, needs_private=needs_private
        )
    assert plan is not None
    _refuse_aliases(plan, are_local)
    if settings.advise and plan.size < 2:
        raise ConfigError("--advise needs at least two ranks. Add -np 2, or more hosts with -H.")
    hosts = tuple(maker.make(index, *row) for index, row in enumerate(zip(plan.hosts, are_local)))
    return replace(job, plan=plan, hosts=hosts)


def _certificate(public: str) -> str:
    """Return a certificate for the job; `public` is the host because of which it encrypts, if one is."""
    try:
        return make_certificate()
    except ConfigError as problem:
        if not public:
            raise
        text = f"{problem} It is needed because {public} has a public address; --no-encrypt does without it."
        raise ConfigError(text) from None


def _by_host(options: Options, plan: Optional[Plan]) -> Dict[str, Dict[Optional[str], str]]:
    """Return the values of ``--python``, ``--cwd`` and ``--iface`` by host; the key None is for all hosts."""
    found = {}
    for name in ("python", "cwd", "iface"):
        # An elastic job, or a project file, may name any host.
        is_open = plan is None or options.is_elastic or name in options.project_names
        hosts = None if is_open or plan is None else [host.spec.name for host in plan.hosts]
        found[name] = per_host(f"--{name}", getattr(options, name), hosts)
    return found


def _notes(
    options: Options, environ: Mapping[str, str], allocation: Optional[Allocation], public: str
) -> List[str]:  # fmt: skip
    """Return the lines to show before the job starts."""
    notes = [] if options.hosts is None else lists_in(_named(options), os.environ)
    if options.horovod:
        notes += horovod_without_effect(environ)
    if allocation is not None and needs_hosts(options):
        notes.append(allocation.describe())
    if public:
        text = f"{public} has a public address, so connections are encrypted (--no-encrypt: they are not)"
        notes.append(text)
    return [*notes, *not_forwarded(() if "forward" in options.project_names else options.forward, environ)]


def needs_hosts(options: Options) -> bool:
    """Return whether no option names the hosts, so that those of a surrounding scheduler job are used."""
    return options.hosts is None and options.hostfile is None and options.host_discovery_script is None


def _plan(
    options: Options, allocation: Optional[Allocation], joined: Sequence[HostSpec] = ()
) -> Optional[Plan]:
    """Return the hosts and ranks, for elastic jobs the hosts only; None if a discovery script lists them."""
    specs = [*read_hosts(options, allocation), *joined]
    if joined and options.host_discovery_script is not None:
        raise ConfigError("--host-discovery-script names all hosts, so no machine can be invited.")
    if not options.is_elastic:
        is_open = allocation is not None and needs_hosts(options) and not allocation.is_stated
        return make_plan(options.np, specs, options.oversubscribe or is_open)
    if options.host_discovery_script is None:
        return make_plan(None, fixed_hosts(options, specs))
    if specs:
        raise ConfigError("--host-discovery-script and a list of hosts are both given. Use one of them.")
    return None


def _tree(
    options: Options, environ: Mapping[str, str], command: Command, say: Callable[[str], None]
) -> Tuple[Optional[SourceTree], str]:  # fmt: skip
    """Return the files to send, and the working directory relative to them."""
    if options.ship is None:
        if options.fetch:
            raise ConfigError(
                "--fetch brings files back from the directories that --ship makes. Add --ship."
            )
        return None, "."
    root = Path(options.ship)
    cwd = Path(working_directory(environ))
    code_at = position(root, cwd)
    script = None if options.cwd or Path(command.script or "/").is_absolute() else command.script
    if script and not Path(script).exists():
        raise ConfigError(f"There is no script {script} in {cwd}, so --ship cannot send it.")
    slow = threading.Timer(SLOW_S, say, [f"--ship: looking at the files below {root.absolute()}"])
    slow.daemon = True
    slow.start()
    try:
        tree = SourceTree(root)
    finally:
        slow.cancel()
    own = os.path.normpath(Path(code_at, script or ""))
    if script and not own.startswith("..") and own not in {file.path for file in tree.files}:
        raise ConfigError(f"--ship does not send the program {script}: {tree.why_not_sent(Path(script))}.")
    return tree, code_at


def _report(path: Optional[str]) -> Optional[Path]:
    found = None if path is None else Path(path).absolute()
    if found is not None and (found.is_dir() or not found.parent.is_dir()):
        raise ConfigError(f"--report {path}: this is a directory, or its directory does not exist.")
    return found


def _with_folders(patterns: Sequence[str]) -> Tuple[str, ...]:
    """Return the patterns of ``--fetch``; without a final wildcard they also match a folder's files."""
    found = []
    for pattern in patterns:
        bare = pattern.rstrip("/")
        is_plain = not any(wildcard in bare.rpartition("/")[2] for wildcard in "*?[")
        found += [pattern, f"{bare}/**"] if is_plain else [pattern]
    return tuple(found)


def _refuse_aliases(plan: Plan, are_local: Sequence[bool]) -> None:
    """Refuse this machine under two names: its ranks would count as ranks of two hosts."""
    here = [host for host, is_local in zip(plan.hosts, are_local) if is_local]
    if len(here) > 1:
        names = " and ".join(host.spec.name for host in here)
        raise ConfigError(
            f"{names} are one machine: this one. Name it once, with the number of its ranks, like "
            f"{here[0].spec.name}:{sum(host.used for host in here)}."
        )


def _named(options: Options) -> List[HostSpec]:
    """Return what ``-H`` names: hosts and lists, without machines that join."""
    specs = [] if options.hosts is None else parse_hosts(options.hosts)
    return [spec for spec in specs if not spec.joins]


def invited(options: Options) -> Tuple[int, List[str], int]:
    """Return how many machines join with a code, which known ones join, and the port for them (0: any)."""
    specs = [] if options.hosts is None else parse_hosts(options.hosts)
    found = [spec for spec in specs if spec.joins]
    known = [spec.machine for spec in found if spec.machine]
    ports = {spec.port for spec in found if spec.port}
    twice = [name for name in known if known.count(name) > 1]
    if twice:
        raise ConfigError(f"-H has join:{twice[0]} twice. It joins once: --slots there sets the ranks.")
    if len(ports) > 1:
        numbers = " and ".join(map(str, sorted(ports)))
        raise ConfigError(f"-H has the ports {numbers} for machines that join. All join at one port.")
    return sum(spec.slots or 1 for spec in found if not spec.machine), known, next(iter(ports), 0)


def read_hosts(options: Options, allocation: Optional[Allocation] = None) -> List[HostSpec]:
    """Return the hosts of ``-H`` (with its lists), ``--hostfile`` or the scheduler; none: this machine."""
    if options.hosts is not None and options.hostfile is not None:
        raise ConfigError("-H and --hostfile are both given. Use one of them.")
    specs: List[HostSpec] = []
    if options.hosts is not None:
        specs = with_lists(_named(options), os.environ)
    elif options.hostfile is not None:
        specs = parse_hostfile(read_text("hostfile", options.hostfile), options.hostfile)
    elif allocation is not None and needs_hosts(options):
        specs = list(allocation.hosts)
    if options.slots_per_host is not None and options.host_discovery_script is None:
        specs = specs or ([HostSpec("localhost")] if options.hosts is None else [])
        # Horovod's option is for hosts without a number.
        specs = [
            spec if options.horovod and spec.slots else spec._replace(slots=options.slots_per_host)
            for spec in {spec.target.lower(): spec for spec in specs}.values()
        ]
    return specs


def effective_settings(
    options: Options, environ: Mapping[str, str], ifaces: Mapping[Optional[str], str]
) -> Effective:
    """Return the settings of a job with these options, and the source of each."""
    flags = list(options.setting_values)
    if None in ifaces:
        flags.append(SettingValue("iface", ifaces[None], f"--iface {ifaces[None]}", "--iface"))
    if options.verbose:
        flags.append(SettingValue("verbose", "1", "--verbose", "--verbose"))
    others = horovod_settings(environ) if options.horovod else []
    found = effective([options.project_values, others, values_in(environ), flags])
    InterfaceFilter(found.settings.iface)  # reports an invalid value once here, and not on every host
    return found


# -- one host ---------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)  # variables may be secrets
class HostMaker:
    """Makes the part of a job on each host."""

    command: Command
    environ: Mapping[str, str]
    doors: Doors
    by_host: Mapping[str, Mapping[Optional[str], str]]  # of ``--python`` and so on: :func:`_by_host`
    env: Mapping[str, str] = field(default_factory=dict)  # for all ranks
    local_env: Mapping[str, str] = field(default_factory=dict)  # for ranks on this machine
    shell: Mapping[str, str] = field(default_factory=dict)  # the launching shell's, for ranks elsewhere
    ship_self: bool = True  # otherwise hosts need the same version of ringcomm
    shipped: Optional[Path] = None  # the directory that is sent to other hosts

    def variables(self, is_local: bool) -> Dict[str, str]:
        """Return the variables of a host's ranks, in addition to the host's own environment."""
        return {**self.env, **self.local_env} if is_local else {**self.shell, **self.env}

    def make(self, index: int, planned: PlannedHost, is_local: bool) -> HostJob:
        """Return the part of the job on one host; ConfigError if an option for this host is not valid."""
        spec = planned.spec
        own, common = (
            {name: values.get(key) for name, values in self.by_host.items()} for key in (spec.name, None)
        )
        chosen = spec.python or own["python"] or common["python"]
        named = _found_python(self.command, self.environ)
        # On another host the agent runs with the named interpreter, too: it may be at another path there.
        python = chosen or (named if named and not is_local else sys.executable)
        if is_local:
            python = str(Path(python).expanduser())
        cwd = spec.cwd or own["cwd"] or common["cwd"]
        reach = self.doors.of(spec, is_local)
        env = self.variables(is_local) if is_local or reach.gets_shell else dict(self.env)
        iface = spec.iface or own["iface"]
        if iface:
            InterfaceFilter(iface)
            env["RINGCOMM_IFACE"] = iface
        command = with_interpreter(self.command, named if is_local and not chosen else None)
        gets_code = not is_local and not cwd
        if gets_code and self.shipped is not None:
            command = in_tree(command, self.shipped, Path(working_directory(self.environ)))
        # Links are not resolved: they make virtual environments.
        package = ""
        if self.ship_self:
            is_own = is_local and os.path.abspath(python) == os.path.abspath(sys.executable)  # noqa: PTH100
            package = "" if is_own else own_package().digest
        # A host may lack the interpreter that runs ringrun.
        other = () if is_local or chosen else tuple(reach.argv(spec, "python3"))
        return HostJob(
            index, planned, is_local, reach, python, cwd or working_directory(self.environ), command, env,
            tuple(reach.argv(spec, python)), other, package, gets_code=gets_code,
            finder=finder(python, os.path.expanduser("~")) if other else b"",  # noqa: PTH111
        )  # fmt: skip


def per_host(option: str, values: Sequence[str], hosts: Optional[Sequence[str]]) -> Dict[Optional[str], str]:
    """Return ``[HOST=]VALUE`` options by host; the key None has the value for all hosts."""
    found: Dict[Optional[str], str] = {}
    for text in values:
        left, equals, right = text.partition("=")
        host, value = (left, right) if equals and "/" not in left else (None, text)
        if host is not None and hosts is not None and host not in hosts:
            raise ConfigError(f"{option} {text}: {host!r} is not among the hosts ({', '.join(hosts)}).")
        if not value:
            raise ConfigError(
                f"{option} {text!r} has no value. Write {option} VALUE, or {option} HOST=VALUE."
            )
        if host in found:
            raise ConfigError(f"{option} is given twice: {found[host]} and {value} for {host or 'all'}.")
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


# -- --dry-run --------------------------------------------------------------------------------


def describe(job: Job) -> str:
    """Return the plan, the command lines and the settings for ``--dry-run``, without secrets."""
    lines = _elastic_plan(job) if isinstance(job, ElasticJob) else _plan_lines(job)
    given = [row for row in job.setting_rows if row[2] != "default"]
    if given:
        lines += ["settings:", *(f"  {name} {value}, by {source}" for name, value, source in given)]
    return "\n".join(lines) + "\n"


def _plan_lines(job: Job) -> List[str]:
    plan: Plan = job.plan
    lines = [f"{counted(plan.size, 'rank')} on {counted(len(plan.hosts), 'host')}:"]
    for host in job.hosts:
        ranks = ranks_text([place.rank for place in plan.on_host(host.index)])
        how = host.reach.description
        lines.append(f"  {host.name} ({how}): {ranks} ({counted(host.planned.slots, 'slot')})")
        if host.reach.is_named:
            lines.append(f"    in {host.cwd}: {host.command.text(host.python)}")
        else:
            lines.append(f"    in the directory of ringrun join: {host.command.text('python')}")
        lines += _variables(host.env)
        lines += [f"    started by: {shlex.join(host.argv)}"] if host.reach.is_named else []
    return lines


def _elastic_plan(job: ElasticJob) -> List[str]:
    limits, maker = job.limits, job.maker
    most = "any number of them" if limits.max_np is None else f"at most {limits.max_np}"
    lines = [
        f"An elastic job: it starts with {counted(limits.start_np, 'slot')} or more, runs with at least "
        f"{counted(limits.min_np, 'rank')} and {most}.",
    ]
    if limits.script:
        lines.append(f"  hosts: as {limits.script} prints them")
    for spec, is_local in zip(job.specs, maker.doors.find_local(job.specs)):
        how = maker.doors.of(spec, is_local).description
        lines.append(f"  {spec.target} ({how}): {counted(spec.slots or limits.slots, 'slot')}")
    lines += _variables(maker.variables(is_local=False))
    return [*lines, f"  command: {job.command.text('python')}"]


def _variables(env: Mapping[str, str]) -> List[str]:
    """Return a line with the names of variables; their values may be secrets."""
    return [f"    with {', '.join(sorted(env))} in its environment"] if env else []
