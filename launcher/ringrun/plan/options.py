"""The options of a job, :class:`Options`: each is defined once, with flags, type, default and text. Pure.

The command line and its help, the options of ``ringrun doctor``, the arguments of ``ringcomm.run`` and of
``horovod.run``, and the tables in ``docs/ringrun.md`` are made from this table. It imports only the standard
library, so that the documentation can be built without ringcomm's packages.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Callable, Iterable, List, NamedTuple, Optional, Tuple, TypeVar

if TYPE_CHECKING:
    from ringcomm.configuration.settings import SettingValue

_Function = TypeVar("_Function", bound=Callable[..., Any])

JOB = "The job"
REMOTE = "Other hosts"
ELASTIC = "Elastic jobs"
OUTPUT = "Output"
SETTINGS = "Settings"
INSTEAD = "Instead of a run"
PURPOSES = (JOB, REMOTE, ELASTIC, OUTPUT, SETTINGS, INSTEAD)
"""The sections of the help and of the tables in ``docs/ringrun.md``."""

FLAG, SWITCH, TEXT, PATH, WHOLE, NUMBER = "flag", "switch", "text", "path", "whole", "number"
TEXTS, PER_HOST, VARIABLES = "texts", "per host", "variables"
"""The kinds of values. A ``switch`` has a value behind "=", or "." without one. ``texts`` and the kinds after
it may be repeated on the command line; ``per host`` is ``[HOST=]VALUE`` there, and one value or a dictionary
in Python."""

_TYPES = {
    TEXT: "Optional[str]", PATH: "Union[None, str, os.PathLike[str]]", WHOLE: "Optional[int]",
    NUMBER: "Optional[float]", TEXTS: "Optional[Sequence[str]]",
    PER_HOST: "PerHost", VARIABLES: "Optional[Mapping[str, str]]",
}  # fmt: skip
"""The types of arguments whose default is None."""


class Option(NamedTuple):
    """The description of an option, besides its name, type and default."""

    flags: Tuple[str, ...]  # --help shows the first, --help-all all
    purpose: str  # one of PURPOSES
    doc: str  # for --help-all and the documentation
    kind: str = TEXT
    metavar: str = ""
    within: Tuple[Optional[int], Optional[int]] = (None, None)  # minimum and maximum, or None
    choices: Tuple[str, ...] = ()  # empty: any text
    brief: str = ""  # for --help; "" if only --help-all lists it
    argument: str = ""  # its name in ringcomm.run, or ""
    argument_doc: str = ""  # its description there if that is not doc
    horovod: str = ""  # its name in horovod.run, or ""
    doctor: bool = False  # `ringrun doctor` has it


def _option(default: Any, flags: str, purpose: str, doc: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(tuple(flags.split()), purpose, doc, **more)})


@dataclass(frozen=True)
class Options:
    """The options of a job."""

    # fmt: off
    np: Optional[int] = _option(
        None, "-np --num-proc", JOB, "Number of ranks. Default: one per slot.", kind=WHOLE, metavar="N",
        within=(1, None), brief="Number of ranks.", argument="np", horovod="num_proc", doctor=True)
    hosts: Optional[str] = _option(
        None, "-H --hosts", JOB,
        "Hosts and their slots [1]. A slot is a place for a rank. HOST:SLOTS@PORT adds the SSH port. "
        "join:N stands for N machines that join with a code, join:NAME for one that has joined before. "
        "Default: this machine.",
        metavar="HOST[:SLOTS],…", brief="Hosts, or a list.", argument="hosts", horovod="hosts", doctor=True,
        argument_doc='Hosts with their slots, like ``"localhost,jetson1:2"``; None for this machine.')
    hostfile: Optional[str] = _option(
        None, "--hostfile -hostfile", JOB,
        "File with one host per line, like 'jetson1 slots=2'. A line may have max_slots=, port=, python=, "
        "cwd= and iface=, too.",
        kind=PATH, metavar="FILE", brief="Hosts from a file.", argument="hostfile", horovod="hostfile",
        doctor=True,
        argument_doc="File with one host per line, like 'jetson1 slots=2'. A line may have python=, cwd= and "
        "iface=, too.")
    forward: Tuple[str, ...] = _option(
        (), "-x", JOB,
        "Set a variable for all ranks. NAME alone passes this shell's value, even if NAME is not passed by "
        "default, like PYTHONPATH. 'PREFIX_*' passes several.",
        kind=VARIABLES, metavar="NAME[=VALUE]", brief="Pass a variable.", argument="env",
        argument_doc="Variables for the ranks, as with ``-x NAME=VALUE``.")
    no_env: bool = _option(
        False, "--no-env", JOB, "Pass only the variables of -x to other hosts.", kind=FLAG)
    python: Tuple[str, ...] = _option(
        (), "--python", JOB, "The ranks' Python interpreter. Default: the one that runs ringrun.",
        kind=PER_HOST, metavar="[HOST=]PATH", brief="Interpreter there.", argument="python",
        horovod="executable", doctor=True)
    cwd: Tuple[str, ...] = _option(
        (), "--cwd", JOB, "The ranks' working directory. Default: the current one.", kind=PER_HOST,
        metavar="[HOST=]FOLDER", argument="cwd", doctor=True)
    iface: Tuple[str, ...] = _option(
        (), "--iface --network-interfaces --network-interface", JOB,
        "Network interfaces to use, like 'eth0,en*' or '192.168.1.0/24', or not to use, like '!wlan*'.",
        kind=PER_HOST, metavar="[HOST=]SPEC", brief="Network to use.", argument="iface",
        horovod="network_interfaces", doctor=True)
    restarts: int = _option(
        0, "--restarts", JOB, "Restart the job up to N times when it fails.", kind=WHOLE,
        metavar="N", within=(0, None), brief="Restart N times.", argument="restarts",
        argument_doc="How often the job is restarted if it fails.")
    grace_s: float = _option(
        30.0, "--grace", JOB,
        "Seconds from SIGTERM or 'ringrun stop' until ranks get SIGKILL [30].",
        kind=NUMBER, metavar="S")
    bind: str = _option(
        "none", "--bind", JOB,
        "core: bind each rank to cores of its own [none].", choices=("none", "core"))
    oversubscribe: bool = _option(
        False, "--oversubscribe", JOB, "Allow more ranks than slots.", kind=FLAG)
    slots_per_host: Optional[int] = _option(
        None, "--slots-per-host --slots", JOB,
        "Number of slots on every host, in place of the list's numbers.",
        kind=WHOLE, metavar="N", within=(1, None), argument="slots_per_host", horovod="slots")

    via: Optional[str] = _option(
        None, "--via", REMOTE,
        "Reach hosts by this command, like 'docker exec -i {host}'. 'ssh': use ssh, even in a job of Slurm.",
        metavar="TEMPLATE", argument="via", doctor=True,
        argument_doc="Reach hosts by this command, like ``'docker exec -i {host}'``. ``'ssh'``: use ssh, "
        "even in a job of Slurm.")
    ssh: str = _option(
        "ssh", "--ssh", REMOTE, "The ssh command, with options if needed.", metavar="COMMAND", argument="ssh",
        doctor=True)
    ssh_port: Optional[int] = _option(
        None, "-p --ssh-port", REMOTE, "The ssh port on all hosts.", kind=WHOLE, metavar="PORT",
        within=(1, 65535), argument="ssh_port", horovod="ssh_port", doctor=True)
    ssh_identity_file: Optional[str] = _option(
        None, "-i --ssh-identity-file", REMOTE, "The private key for ssh.", kind=PATH, metavar="FILE",
        argument="ssh_identity_file", horovod="ssh_identity_file", doctor=True)

    ship: Optional[str] = _option(
        None, "--ship", REMOTE,
        "Send the current folder, or a FOLDER above it, to other hosts. Ranks there run in the copy.",
        kind=SWITCH, metavar="FOLDER", brief="Send this folder.", doctor=True)
    fetch: Tuple[str, ...] = _option(
        (), "--fetch", REMOTE,
        "With --ship: at the end, bring files like 'out/*.pt' back to fetched/HOST.",
        kind=TEXTS, metavar="PATTERN")
    provision: bool = _option(
        False, "--provision", REMOTE,
        "Send NumPy to hosts that lack it; hosts without Linux also get psutil.", kind=FLAG,
        brief="Send NumPy, too.", doctor=True,
    )

    min_np: Optional[int] = _option(
        None, "--min-np --min-num-proc", ELASTIC,
        "Make the job elastic: it continues while at least N ranks are left. Default: -np.",
        kind=WHOLE, metavar="N", within=(1, None), brief="Fewest ranks.", argument="min_np",
        horovod="min_num_proc",
        argument_doc="Make the job elastic: it continues after losses while at least so many ranks are left. "
        "Default: the number of ranks.")
    max_np: Optional[int] = _option(
        None, "--max-np --max-num-proc", ELASTIC,
        "Maximum number of ranks of an elastic job. Default: one per slot.",
        kind=WHOLE, metavar="N", within=(1, None), brief="Most ranks.", argument="max_np",
        horovod="max_num_proc")
    host_discovery_script: Optional[str] = _option(
        None, "--host-discovery-script", ELASTIC,
        "Make the job elastic: this command prints the job's hosts, one HOST[:SLOTS] per line.",
        metavar="COMMAND", argument="host_discovery_script", horovod="host_discovery_script")

    output_dir: Optional[str] = _option(
        None, "--output-dir --output-filename", OUTPUT,
        "Folder for copies of the ranks' output: rank.N/stdout and rank.N/stderr.",
        kind=PATH, metavar="FOLDER", brief="Keep output.", argument="output_dir", horovod="output_filename")
    watch: bool = _option(
        False, "--watch", OUTPUT,
        "Show a table of all ranks while they run: steps, data rates, waiting times.", kind=FLAG,
        brief="Show a table.")
    report: Optional[str] = _option(
        None, "--report", OUTPUT,
        "At the end, write an HTML page with curves, waiting times, links and operations.",
        kind=PATH, metavar="FILE.html")
    verbose: bool = _option(
        False, "--verbose", OUTPUT,
        "Log the job's progress, and show the links between ranks.", kind=FLAG,
        argument="verbose", horovod="verbose")

    horovod: bool = _option(
        False, "--horovod", SETTINGS,
        "For scripts of Horovod: importing horovod gives ringcomm, and HOROVOD_* variables apply.",
        kind=FLAG, brief="Act as Horovod.", argument="horovod")
    # fmt: on
    ship_self: bool = True  # other hosts get this machine's ringcomm; the doctor examines theirs
    setting_values: Tuple[SettingValue, ...] = ()  # from flags; the table is ringcomm.config.Settings
    project_values: Tuple[SettingValue, ...] = ()  # from ringrun.toml
    # fields from ringrun.toml, where other hosts and variables that are not set are ignored
    project_names: Tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_elastic(self) -> bool:
        return self.host_discovery_script is not None or self.min_np is not None


def table() -> List[Tuple[Field[Any], Option]]:
    """Return the fields of :class:`Options` that are options, in their order."""
    return [(item, item.metadata["option"]) for item in fields(Options) if "option" in item.metadata]


def argument(item: Field[Any], name: str) -> inspect.Parameter:
    """Return an option as a parameter of a Python function."""
    option: Option = item.metadata["option"]
    default = None if item.default == () else item.default
    annotation = _TYPES[option.kind] if default is None else type(default).__name__
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def described(name: str, option: Option) -> str:
    """Return the line of a docstring about an option, by its name in that function."""
    doc = option.argument_doc or option.doc
    doc = doc[0].lower() + doc[1:]
    by_host = " One value, or a dictionary by host; its key None stands for all others."
    text = f"{name}: {doc}{by_host if option.kind == PER_HOST else ''}"
    return textwrap.fill(text, 106, subsequent_indent="    ", break_long_words=False)


def with_options(doc: Optional[str], rows: Iterable[str]) -> str:
    """Return a docstring in which a line ``{options}`` is replaced by rows of :func:`described`."""
    lines = "\n".join(rows)
    return re.sub(r"(?m)^( *)\{options\}$", lambda found: textwrap.indent(lines, found[1]), doc or "")


def arguments_of_run() -> List[str]:
    """Return the descriptions of the options that are arguments of ``ringcomm.run``."""
    return [described(option.argument, option) for _, option in table() if option.argument]


def takes_options(function: _Function) -> _Function:
    """Decorator: give ``**options`` the names, types, defaults and descriptions of :class:`Options`."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    made = [argument(item, option.argument) for item, option in table() if option.argument]
    signature = inspect.signature(function).replace(parameters=[*own, *made])
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__doc__ = with_options(function.__doc__, arguments_of_run())
    return function
