"""Options of mpirun (Open MPI and MPICH), torchrun, mlx.launch, accelerate and srun, as ringrun's. Pure.

A command line for mpirun works with only the program's name changed: options that have a meaning here become
ringrun's, the others are accepted with a line about their replacement. The command line is translated before
ringrun parses it, so ringrun's options and mpirun's may be mixed.
"""

from __future__ import annotations

import re
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ringcomm.errors import ConfigError

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"
"""Replacements of a hyphen by word processors and web pages."""


class Translated(NamedTuple):
    """A command line in ringrun's options."""

    words: List[str]
    notes: List[str]  # for the user, about options that are replaced
    hosts: Optional[Tuple[str, int]] = None  # the option that requests a number of hosts, and the number


Rule = Callable[[Sequence[str]], Tuple[List[str], str]]
"""Translates an option's values to ringrun's words and a note, or ""."""


def _same(option: str) -> Rule:
    return lambda values: ([option, *values], "")


def _nothing(note: str = "") -> Rule:
    return lambda values: ([], note)


def _map_by(values: Sequence[str]) -> Tuple[List[str], str]:
    policy = values[0].lower()
    parts = policy.split(":")
    if parts[0] == "ppr" and len(parts) >= 3 and parts[1].isdigit() and parts[2] == "node":
        return ["--slots-per-host", parts[1]], ""
    if parts[0] in ("slot", "core", "hwthread", ""):
        return [], ""
    return [], f"ranks fill the hosts in the order given, slot after slot (--map-by {values[0]} is not done)"


def _bind_to(values: Sequence[str]) -> Tuple[List[str], str]:
    policy = values[0].lower().partition(":")[0]
    if policy in ("none", "core"):
        return ["--bind", policy], ""
    if policy in ("hwthread", "l1cache", "l2cache", "l3cache", "socket", "package", "numa", "board"):
        return ["--bind", "core"], f"--bind-to {values[0]}: ranks are bound to cores"
    return [], f"--bind-to {values[0]} is not done: ranks are not bound"


def _mca(values: Sequence[str]) -> Tuple[List[str], str]:
    key, value = values
    if key in ("btl_tcp_if_include", "oob_tcp_if_include"):
        return ["--iface", value], ""
    if key in ("btl_tcp_if_exclude", "oob_tcp_if_exclude"):
        names = [f"!{name}" for name in value.split(",") if name and name not in ("lo", "127.0.0.1/8")]
        return (["--iface", ",".join(names)] if names else []), ""
    if key == "plm_rsh_args":
        return ["--ssh", f"ssh {value}"], ""
    if key == "plm_rsh_agent":
        return ["--ssh", value], ""
    if key in ("rmaps_base_oversubscribe", "hwloc_base_binding_policy"):
        return (["--oversubscribe"], "") if key.startswith("rmaps") else _bind_to([value])
    if key in _MPI_TRANSPORT or key.startswith(("btl_", "pml_", "mtl_", "coll_")):
        return [], ""  # which of MPI's transports is used: ringcomm has its own
    return [], f"--mca {key} {value} has no effect: ringcomm does not use MPI"


_MPI_TRANSPORT = ("btl", "pml", "mtl", "coll", "oob", "orte_base_help_aggregate", "mpi_warn_on_fork")


def _forward_each(values: Sequence[str]) -> Tuple[List[str], str]:
    return [word for name in values[0].split(",") for word in ("-x", name)], ""


def _per_host(values: Sequence[str]) -> Tuple[List[str], str]:
    if not values[0].isdigit():
        return [], f"--nproc-per-node {values[0]} is not done: give a number"
    return ["--slots-per-host", values[0]], ""


def _precision(values: Sequence[str]) -> Tuple[List[str], str]:
    return ["-x", f"ACCELERATE_MIXED_PRECISION={values[0]}"], ""


_RUN_ONCE = "ringrun starts the ranks of all hosts: run it once, on one of them"
_NO_TIME = "lines come without a time"
_HOSTS = ("nnodes", "nodes", "num-machines")
"""Options for a number of hosts, or a range, as in ``1:4``."""

_RULES: Dict[str, Tuple[int, Rule]] = {
    **dict.fromkeys(("n", "c", "np"), (1, _same("-np"))),
    **dict.fromkeys(("host", "hosts"), (1, _same("-H"))),
    **dict.fromkeys(("machinefile", "f", "default-hostfile"), (1, _same("--hostfile"))),
    **dict.fromkeys(("wdir", "wd", "workdir"), (1, _same("--cwd"))),
    **dict.fromkeys(("npernode", "N", "ppn", "perhost", "nproc-per-node"), (1, _per_host)),
    "pernode": (0, lambda values: (["--slots-per-host", "1"], "")),
    **dict.fromkeys(("mca", "gmca", "omca", "prtemca"), (2, _mca)),
    "map-by": (1, _map_by),
    "rank-by": (1, _map_by),
    "bind-to": (1, _bind_to),
    "bind-to-core": (0, lambda values: (["--bind", "core"], "")),
    "bind-to-socket": (0, lambda values: _bind_to(["socket"])),
    "bind-to-none": (0, lambda values: (["--bind", "none"], "")),
    **dict.fromkeys(("byslot", "allow-run-as-root", "nooversubscribe", "no-oversubscribe"), (0, _nothing())),
    **dict.fromkeys(("bynode", "bysocket", "bycore"), (0, lambda values: _map_by(["node"]))),
    "tag-output": (0, _nothing()),
    "prepend-rank": (0, _nothing()),
    "l": (0, _nothing()),
    **dict.fromkeys(("timestamp-output", "timestamp"), (0, _nothing(_NO_TIME))),
    "genv": (2, lambda values: (["-x", f"{values[0]}={values[1]}"], "")),
    "env": (2, lambda values: (["-x", f"{values[0]}={values[1]}"], "")),
    **dict.fromkeys(("genvlist", "envlist"), (1, _forward_each)),
    **dict.fromkeys(("genvall", "envall"), (0, _nothing())),
    **dict.fromkeys(("genvnone", "envnone"), (0, lambda values: (["--no-env"], ""))),
    **dict.fromkeys(("launcher", "bootstrap", "rmk"), (1, _nothing("hosts are reached by ssh (--ssh)"))),
    **dict.fromkeys(("report-bindings", "display-map", "display-allocation"), (0, _nothing("see --dry-run"))),
    "display": (1, _nothing("see --dry-run")),
    **dict.fromkeys(("q", "quiet", "use-hwthread-cpus", "enable-recovery", "xterm"), (0, _nothing())),
    "timeout": (1, _nothing("a job of ringrun has no time limit")),
    "prefix": (1, _nothing("there is no MPI to find on the hosts: --prefix has no effect")),
    **dict.fromkeys(("report-pid", "report-uri", "am", "tune", "app"), (1, _nothing("that is MPI's"))),
    **dict.fromkeys(_HOSTS, (1, _nothing())),
    "max-restarts": (1, _same("--restarts")),
    "log-dir": (1, _same("--output-dir")),
    **dict.fromkeys(("no-python", "use-env"), (0, _nothing())),
    **dict.fromkeys(("redirects", "monitor-interval", "role", "start-method", "rdzv-conf", "local-addr"),
                    (1, _nothing())),
    "standalone": (0, _nothing()),
    "tee": (1, _nothing("the output of all ranks is shown")),
    # accelerate launch
    "num-processes": (1, _same("-np")),
    **dict.fromkeys(("dynamo-backend", "gpu-ids"), (1, _nothing())),
    **dict.fromkeys(("machine-rank", "main-process-ip", "main-process-port"), (1, _nothing(_RUN_ONCE))),
    "mixed-precision": (1, _precision),
    "num-cpu-threads-per-process": (1, _same("--threads")),
    **dict.fromkeys(("multi-gpu", "same-network"), (0, _nothing())),
    # srun
    "ntasks": (1, _same("-np")),
    "ntasks-per-node": (1, _per_host),
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-task", "partition", "mem"),
                    (1, _nothing("ringrun allocates nothing; in a job of Slurm it takes its nodes"))),
    **dict.fromkeys(("rdzv-backend", "rdzv-id"), (1, _nothing())),
    **dict.fromkeys(("rdzv-endpoint", "master-addr", "master-port", "node-rank"), (1, _nothing(_RUN_ONCE))),
    "repeat-hosts": (1, _per_host),
    "backend": (1, _nothing("the ranks are connected by ringcomm")),
    **dict.fromkeys(("connections-per-ip", "starting-port", "nccl-port"), (1, _nothing())),
    "mpi-arg": (1, _nothing("that is MPI's")),
}  # fmt: skip
"""By name without leading dashes, with hyphens inside: the number of values of an option, and its rule."""


_INTERFACES = ("--network-interface", "--network-interfaces")
"""Horovod's names of ``--iface``."""


def translate(words: Sequence[str], own: Callable[[str], Optional[int]]) -> Translated:
    """Replace the options of mpirun, torchrun and mlx.launch in a command line by ringrun's. `own` returns
    the number of values of a ringrun option, which keeps ringrun's meaning, and None for other words.

    Replacing ends at the first word that is not an option, at ``--``, and at an option that is unknown or
    lacks its values: all following words stay, the ranks' command among them.
    """
    found, notes, hosts = [], [], None
    position = 0
    while position < len(words):
        word = _with_hyphens(words[position])
        name, equals, value = word.partition("=")
        count = own(name)
        if name in _INTERFACES:
            name, word = "--iface", "--iface" + equals + value
        if not word.startswith("-") or word == "--":
            break
        if count is not None:
            taken = 0 if equals else count
            found += [name, value] if equals and name == "--iface" else [word]
            found += words[position + 1 : position + 1 + taken]
            position += 1 + taken
            continue
        bare = name.lstrip("-").replace("_", "-")
        rule = _RULES.get(bare)
        if rule is None:
            break
        values = [value] if equals else list(words[position + 1 : position + 1 + rule[0]])
        if bare == "env" and "=" in "".join(values[:1]):  # mlx.launch has one value, MPICH two
            rule, values = (1, _same("-x")), values[:1]
        if len(values) < rule[0]:
            break
        replaced, note = rule[1](values)
        if bare in _HOSTS and values[0].partition(":")[0].isdigit():
            hosts = (name, int(values[0].partition(":")[0]))
        found += replaced
        if note:
            notes.append(f"{word}: {note}" if not note.startswith("--") else note)
        position += 1 + (0 if equals else rule[0])
    rest = list(words[position:])
    if rest and rest[0][:1] in _DASHES:
        rest[0] = _with_hyphens(rest[0])
    return Translated([*_joined_ifaces(found), *rest], notes, hosts)


def _with_hyphens(word: str) -> str:
    """Return the word with hyphens in place of dashes at its beginning."""
    bare = word.lstrip(_DASHES)
    return "-" * (len(word) - len(bare)) + bare if len(bare) < len(word) else word


def _joined_ifaces(words: Sequence[str]) -> List[str]:
    """Merge several ``--iface`` for all hosts into one; Open MPI has one for each of two layers."""
    values: List[str] = []
    rest: List[str] = []
    position = 0
    while position < len(words):
        value = words[position + 1 : position + 2]
        if words[position] == "--iface" and value and "=" not in value[0]:
            values += [item for item in value[0].split(",") if item not in values]
            position += 2
        else:
            rest.append(words[position])
            position += 1
    return [*(["--iface", ",".join(values)] if values else []), *rest]


def values_of(option: str) -> int:
    """Return the number of values of an option of mpirun or torchrun; 0 if it has none, or is unknown."""
    rule = _RULES.get(option.lstrip("-").replace("_", "-"))
    return 0 if rule is None else rule[0]


def names() -> List[str]:
    """Return all known options, with two hyphens (one letter: one)."""
    return sorted(f"-{name}" if len(name) == 1 else f"--{name}" for name in _RULES)


# -- other launchers as the program: ``ringrun torchrun --nproc-per-node=2 train.py`` --------------
# Started as the ranks' program, such a launcher would start all ranks once for each rank. So its name is
# removed and its options become ringrun's, or an error says what to write instead. A launcher that is named
# with a path (/usr/bin/docker) is a program like any other.

_TORCH = ("torch.distributed.run", "torch.distributed.launch")
_ITSELF = "ringrun starts the ranks itself"
_LEFT_OUT = (
    "torchrun", "mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpirun.mpich", "mpiexec.openmpi",
    "mpiexec.mpich", "orterun", "prterun", "horovodrun",
)  # fmt: skip
"""Launchers whose options are all here and in :mod:`.horovod`."""
_RENAMED: Dict[str, Dict[str, Tuple[int, str]]] = {
    "mlx.launch": {"-n": (1, "--slots-per-host"), "-p": (1, ""), "--env": (1, "-x")},
    "accelerate": {"--config-file": (1, ""), "--cpu": (0, ""), "--debug": (0, ""), "--module": (0, "-m")},
}  # fmt: skip
"""Options that ringrun has under another name, or does not have, or uses with another meaning."""
_INSTEAD: Mapping[str, str] = {
    "srun": "inside a job of Slurm (sbatch, salloc) ringrun takes its nodes and tasks: write `ringrun "
    "train.py` there, without srun. Partition, time and resources are options of sbatch or salloc",
    **dict.fromkeys(
        ("docker", "podman"),
        "ringrun starts ranks in containers that run already, one per host: {name} run -d --name box1 IMAGE "
        "sleep infinity, then `ringrun --via '{name} exec -i {{host}}' -H box1,box2 train.py`",
    ),
    "deepspeed": "ringrun does not have DeepSpeed's engine. For a script of torch.distributed, write "
    '`ringrun -np 2 train.py`, and init_process_group("ringcomm") in it',
}  # fmt: skip


def without_launcher(words: Sequence[str]) -> Optional[Translated]:
    """Return the command line of another launcher without its name, with lines for the user; None if the
    command is not a launcher. ConfigError says what to write if ringrun cannot replace it.
    """
    name = words[0] if words else ""
    if name in _INSTEAD:
        raise ConfigError(f"{name}: {_INSTEAD[name].format(name=name)}.")
    if name in _LEFT_OUT:
        return Translated(list(words[1:]), [f"{name} is left out: {_ITSELF}"])
    if name == "mlx.launch":
        return _renamed(name, words[1:])
    if name == "accelerate" and words[1:2] == ["launch"]:
        return _renamed(name, words[2:])
    start = 1 if re.fullmatch(r"(.*/)?python(3(\.\d+)?)?", name) else 0
    if words[start : start + 1] == ["-m"] and words[start + 1 : start + 2] and words[start + 1] in _TORCH:
        return Translated(list(words[start + 2 :]), [f"{words[start + 1]} is left out: {_ITSELF}"])
    return None


def _renamed(name: str, words: Sequence[str]) -> Translated:
    """Return the words after a launcher that has its own options."""
    rules = _RENAMED[name]
    found: List[str] = []
    unused: List[str] = []
    position = 0
    while position < len(words) and words[position].startswith("-"):
        option, equals, value = words[position].partition("=")
        count, own = rules.get(option.replace("_", "-"), (values_of(option), option))
        values = [value] if equals else list(words[position + 1 : position + 1 + count])
        position += 1 + (0 if equals else count)
        if own == "-m":
            return Translated([*found, "-m", *words[position:]], _notes(name, unused))
        if own:
            found += [own, *values]
        elif count:
            unused.append(option)
    return Translated([*found, *words[position:]], _notes(name, unused))


def _notes(name: str, unused: Sequence[str]) -> List[str]:
    more = f"; {', '.join(unused)}: nothing that ringrun needs" if unused else ""
    return [f"{name} is left out: {_ITSELF}{more}"]
