"""The hosts of a job: ``-H`` lists, hostfiles, and those that a scheduler has given. Pure: no name is
resolved, no host is contacted, and files are read through a function that is passed in.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ringcomm.errors import ConfigError

JOIN = "join"
"""Among hosts, in place of a name: a machine that joins with a code; its slots are the number of machines."""
MAX_SLOTS = 65535  # of one host; also the highest port
MAX_HOSTS = 1 << 16
MAX_PER_CORE = 8
"""More slots per core are probably a mistake."""
_PORTS = (22, 222, 2022, 2222, 8022, 10022, 22022, 22222)
"""Numbers of slots that are probably sshd's port, unless the host has as many cores."""


class HostSpec(NamedTuple):
    """One host as the user named it; None means: not given."""

    name: str  # host name, ssh alias or address (IPv6 without brackets)
    user: Optional[str] = None
    slots: Optional[int] = None
    python: Optional[str] = None
    cwd: Optional[str] = None
    iface: Optional[str] = None  # which interfaces ranks there may use
    max_slots: Optional[int] = None  # with --oversubscribe; None: no limit
    port: Optional[int] = None  # sshd's
    machine: Optional[str] = None  # a known machine that joins

    @property
    def target(self) -> str:
        """ssh's destination argument: ``user@name`` or ``name``."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def joins(self) -> bool:
        """Whether it stands for machines that join with a code, or for a known one."""
        return self.name == JOIN and self.user is None

    @property
    def item(self) -> str:
        """The host as an item of ``-H``: with brackets and slots."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        port = "" if self.port is None else f"@{self.port}"
        if self.machine is not None:
            return f"{name}:{self.machine}{port}"
        slots = "" if self.slots is None and not port else f":{self.slots or 1}{port}"
        return f"{self.user}@{name}{slots}" if self.user else name + slots


_FORM = (
    "Write HOST, HOST:SLOTS, HOST:SLOTS@PORT (of its sshd), USER@HOST:SLOTS, or [IPV6]:SLOTS. Slots are the "
    f"number of ranks that may run there, from 1 to {MAX_SLOTS}"
)
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_ADDRESS = r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.\-]+)?"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.+\\\-]*"
_HOST = re.compile(
    rf"(?:(?P<user>{_USER})@)?(?:(?P<name>{_NAME})|\[(?P<address>{_ADDRESS})\])"
    r"(?::(?P<slots>[0-9]{1,9})(?:@(?P<port>[0-9]{1,5}))?)?"
)
_KNOWN = re.compile(
    rf"{JOIN}:(?P<machine>(?![0-9]+(?:@|$))[A-Za-z0-9][A-Za-z0-9_-]{{0,62}})(?:@(?P<port>[0-9]{{1,5}}))?"
)
_KEYS = ("slots", "max_slots", "port", "python", "cwd", "iface")


def parse_hosts(text: str) -> List[HostSpec]:
    """Parse ``host[:slots],…``, the value of ``-H``. ConfigError names a wrong item and the valid forms."""
    items = text.split(",")
    count = f" of {len(items)}" if len(items) > 1 else ""
    return [
        parse_host(item.strip(), f"-H item {number}{count}" if count else "-H")
        for number, item in enumerate(items, 1)
    ]


def parse_host(item: str, where: str) -> HostSpec:
    """Parse one ``[user@]host[:slots[@port]]``; ConfigError begins with `where`."""
    known, found = _KNOWN.fullmatch(item), _HOST.fullmatch(item)
    if known is not None:
        port = _number(known["port"], f"{where}: {item!r}") if known["port"] else None
        return HostSpec(JOIN, port=port, machine=known["machine"])
    if found is None:
        hint = "" if item else " (is there one comma too many?)"
        raise ConfigError(f"{where}: {item!r} is not a host{hint}. {_FORM}.")
    given = (found["slots"], found["port"])
    slots, port = (_number(text, f"{where}: {item!r}") if text else None for text in given)
    return HostSpec(found["name"] or found["address"], found["user"], slots, port=port)


def _number(text: str, where: str) -> int:
    """Return a number of slots, or a port."""
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_SLOTS:
        raise ConfigError(f"{where}: {text!r} is not a whole number from 1 to {MAX_SLOTS}. {_FORM}.")
    return int(text)


def is_host_name(text: str) -> bool:
    """Return whether a text can be the name or the address of a host."""
    return re.fullmatch(f"{_NAME}|{_ADDRESS}", text) is not None


def check_host(spec: HostSpec, where: str) -> None:
    """Check a host's name and account before use in a command line; ConfigError begins with `where`."""
    if not is_host_name(spec.name) or not re.fullmatch(_USER, spec.user or "user"):
        raise ConfigError(f"{where}: {spec.target!r:.80} is not a host. {_FORM}.")


def refuse_joining(spec: HostSpec, where: str) -> None:
    """Raise ConfigError for what stands for machines that join, in a list of hosts that ssh reaches."""
    if spec.joins:
        raise ConfigError(
            f"{where}: machines join with a code when a job starts: ringrun -H localhost,join:2 train.py. (A "
            "host of this name is reached as USER@join.)"
        )


def parse_hostfile(text: str, path: str) -> List[HostSpec]:
    """Parse a hostfile in MPI style, with a host per line, or one of ``mlx.launch``, which is JSON."""
    if re.match(r"\s*(\{|\[\s*[\]{])", text):
        return _of_mlx(text, path)
    specs: List[HostSpec] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            words = shlex.split(re.sub(r"\s*=\s*", "=", line), comments=True)
        except ValueError as problem:
            raise ConfigError(f"{where}: {line.strip()!r} cannot be parsed ({problem}).") from None
        specs += [_line(words, where)] if words else []
    if not specs:
        raise ConfigError(f"{path} names no host. Write one per line, like: jetson1 slots=2")
    return specs


def _line(words: List[str], where: str) -> HostSpec:
    spec = parse_host(words[0], where)
    refuse_joining(spec, where)
    given: Dict[str, Any] = {"slots": spec.slots, "port": spec.port}
    for word in words[1:]:
        key, _, value = word.replace("max-slots", "max_slots").partition("=")
        if key not in _KEYS or not value or given.get(key) is not None:
            known = ", ".join(f"{name}=…" for name in _KEYS)
            raise ConfigError(f"{where}: {word!r} is not an option of a host: {known}, each once.")
        given[key] = _number(value, where) if key in ("slots", "max_slots", "port") else value
    if (given.get("max_slots") or MAX_SLOTS) < (given["slots"] or 0):
        raise ConfigError(f"{where}: max_slots={given['max_slots']} is less than slots={given['slots']}.")
    return spec._replace(**given)


def _of_mlx(text: str, path: str) -> List[HostSpec]:
    """Parse a hostfile of ``mlx.launch``; consecutive entries of one host become its slots."""
    form = f'{path} is not a list of hosts like [{{"ssh": "a", "ips": ["10.0.0.1"]}}]'
    try:
        found: Any = json.loads(text)
    except ValueError as problem:
        raise ConfigError(f"{form}: {problem}.") from None
    listed = found.get("hosts") if isinstance(found, dict) else found
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{form}.")
    if isinstance(found, dict) and found.get("envs"):
        passed = " ".join(f"-x {item}" for item in found["envs"])
        raise ConfigError(f"{path}: envs are not taken from a hostfile. Remove them, and add: {passed}")
    specs: List[HostSpec] = []
    for number, item in enumerate(listed, 1):
        name, addresses = (item.get("ssh"), item.get("ips") or []) if isinstance(item, dict) else (None, [])
        if not isinstance(name, str) or not isinstance(addresses, list):
            raise ConfigError(f"{form}: see host {number}.")
        # The addresses of the interfaces that ranks on this host use.
        iface = ",".join(f"{address}/{128 if ':' in str(address) else 32}" for address in addresses)
        spec = parse_host(name, f"{path}, host {number}")
        refuse_joining(spec, f"{path}, host {number}")
        spec = spec._replace(slots=1, iface=iface or None)
        if specs and specs[-1]._replace(slots=1) == spec:
            spec = spec._replace(slots=(specs.pop().slots or 0) + 1)
        specs.append(spec)
    return specs


def crowding(spec: HostSpec, cores: float) -> str:
    """Return a paragraph if a host has an unusual number of slots for its cores, or ""."""
    slots = spec.slots or 0
    if slots <= MAX_PER_CORE * cores and not (slots in _PORTS and slots > cores):
        return ""
    port = f" If {slots} is the port of its sshd, write {spec._replace(slots=1, port=slots).item}."
    return (
        f"{spec.name}: {spec.item} asks for {slots} ranks there, and it has {cores:.3g} "
        f"core{'' if cores == 1 else 's'}.{port if slots in _PORTS else ''} -np N sets the number of ranks, "
        "and --oversubscribe accepts this one."
    )


# -- the hosts of a scheduler's job, from its variables and host files --------------------------------

Read = Callable[[str, str], str]
"""Reads a file, from its kind (for messages) and its path. Raises ConfigError."""
HOSTFILE_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
)  # fmt: skip
"""Set by the MPI Operator of Kubernetes and by Kubeflow's runtimes for MPI."""
_STARTED = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)
"""Variables of the size and the rank that launchers set."""


class Allocation(NamedTuple):
    """Hosts that belong to the surrounding job of a scheduler."""

    title: str  # the scheduler and its job, for messages
    hosts: Tuple[HostSpec, ...]
    job: str = ""  # Slurm's job number, whose hosts are reached by srun; "" for ssh
    here: str = ""  # the scheduler's name of this machine, or ""
    may_appear: bool = False  # hosts may still be starting
    is_stated: bool = True  # a number of tasks was requested; otherwise -np may be larger

    def describe(self) -> str:
        """Return a line about the origin of the hosts."""
        listed = [f"{host.name}:{host.slots or 1}" for host in self.hosts]
        shown = ", ".join(listed if len(listed) <= 8 else [*listed[:7], f"and {len(listed) - 7} more"])
        return f"hosts and slots are those of {self.title}: {shown}"


def find_allocation(environ: Mapping[str, str], read: Read) -> Optional[Allocation]:
    """Return the allocation in which ringrun runs, or None."""
    found = _slurm(environ) or _operator(environ, read)
    if found is not None:
        for host in found.hosts:
            check_host(host, found.title)
    return found


def _slurm(environ: Mapping[str, str]) -> Optional[Allocation]:
    job = environ.get("SLURM_JOB_ID", "")
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not job or not listed:
        return None
    names = expand(listed)
    tasks = environ.get("SLURM_TASKS_PER_NODE", "")
    counts = tasks_per_node(tasks) if tasks else [1] * len(names)
    if len(counts) != len(names):
        # In a step on some of the nodes the variable is the step's.
        names = expand(environ.get("SLURM_STEP_NODELIST", listed))
        if len(counts) != len(names):
            raise ConfigError(
                f"SLURM_TASKS_PER_NODE={tasks!r} has {len(counts)} numbers, but the node list {listed!r:.80} "
                f"has {len(names)} names. Give the hosts with -H."
            )
    hosts = tuple(HostSpec(name, slots=count) for name, count in zip(names, counts))
    is_stated = any(environ.get(name) for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"))
    here = environ.get("SLURMD_NODENAME", "")
    return Allocation(f"Slurm job {job}", hosts, job, here, is_stated=is_stated)


def _operator(environ: Mapping[str, str], read: Read) -> Optional[Allocation]:
    variable = next((name for name in HOSTFILE_VARIABLES if environ.get(name)), None)
    if variable is None:
        return None
    path = environ[variable]
    hosts = tuple(parse_hostfile(read(f"hostfile of {variable}", path), path))
    return Allocation(f"{path} ({variable})", hosts, may_appear=True)


def refuse_many_launchers(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if srun or mpirun has started ringrun several times."""
    for launcher, size, identity in _STARTED:
        count = environ.get(size, "")
        if count.isdigit() and int(count) > 1 and identity in environ and "SLURM_PTY_PORT" not in environ:
            raise ConfigError(
                f"{launcher} has started ringrun {count} times ({size}={count}), and each would start the "
                f"whole job. Start it once, without {launcher}; or start the script itself with {launcher} "
                "and without ringrun."
            )


# -- Slurm's lists: ``node[01-03,7],gpu[1-2]-ib[0,3]``, and tasks per node: ``2(x3),1`` -----------


def expand(text: str) -> List[str]:
    """Return the names in a node list in its order, repeated ones included."""
    names: List[str] = []
    for item in map(str.strip, re.split(r",(?![^\[]*\])", text)):
        if not re.fullmatch(r"(?:[^\[\],]|\[[^\[\]]+\])+", item):
            raise _bad(text)
        # Text and numbers in turns: the product of all.
        parts = re.split(r"\[(.*?)\]", item)
        choices = [_numbers(part, text) if index % 2 else [part] for index, part in enumerate(parts)]
        if len(names) + math.prod(map(len, choices)) > MAX_HOSTS:
            raise ConfigError(f"The node list {text!r:.80} has more than {MAX_HOSTS} names.")
        names += map("".join, itertools.product(*choices))
    return names


def _numbers(listed: str, text: str) -> List[str]:
    numbers: List[str] = []
    for part in listed.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if not 0 <= int(last) - int(first) <= MAX_HOSTS:
            raise _bad(text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def tasks_per_node(text: str) -> List[int]:
    """Return the numbers in a list like ``3,1`` or ``2(x2),1``; ConfigError for another form."""
    counts: List[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None or int(found[2] or 1) > MAX_HOSTS:
            raise ConfigError(f"{text!r:.80} is not a list of tasks per node like '2(x3),1'.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _bad(text: str) -> ConfigError:
    return ConfigError(f"{text!r:.80} is not a list of nodes like 'n[01-03],gpu1': give hosts with -H.")
