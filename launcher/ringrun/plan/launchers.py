"""Options of other launchers, as ringrun's: horovodrun, mpirun (Open MPI and MPICH), torchrun, mlx.launch,
accelerate and srun. Pure.

Their command lines work with only the program's name changed: options that have a meaning here become
ringrun's, the others are accepted, with a line about their replacement where one is missed. The command line
is translated before ringrun parses it, so ringrun's options and theirs may be mixed.
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


class Rule(NamedTuple):
    """What an option becomes."""

    values: int  # the number that it takes
    words: str = ""  # ringrun's, with {0} and {1} for the values
    note: str = ""
    function: Optional[Callable[..., Tuple[List[str], str]]] = None  # from the values to words and a note

    @property
    def has_effect(self) -> bool:
        return bool(self.words or self.function)

    def apply(self, values: Sequence[str]) -> Tuple[List[str], str]:
        if self.function is not None:
            return self.function(*values)
        return [word.format(*values) for word in self.words.split()], self.note


# -- options whose meaning depends on their values -------------------------------------------------


def _map_by(policy: str) -> Tuple[List[str], str]:
    parts = policy.lower().split(":")
    if parts[0] == "ppr" and len(parts) >= 3 and parts[1].isdigit() and parts[2] == "node":
        return ["--slots-per-host", parts[1]], ""
    if parts[0] in ("slot", "core", "hwthread", ""):
        return [], ""
    return [], f"ranks fill the hosts in the order given, slot after slot (--map-by {policy} is not done)"


def _bind_to(policy: str) -> Tuple[List[str], str]:
    bare = policy.lower().partition(":")[0]
    if bare in ("none", "core"):
        return ["--bind", bare], ""
    if bare in ("hwthread", "l1cache", "l2cache", "l3cache", "socket", "package", "numa", "board"):
        return ["--bind", "core"], f"--bind-to {policy}: ranks are bound to cores"
    return [], f"--bind-to {policy} is not done: ranks are not bound"


def _mca(key: str, value: str) -> Tuple[List[str], str]:
    if key in ("btl_tcp_if_include", "oob_tcp_if_include"):
        return ["--iface", value], ""
    if key in ("btl_tcp_if_exclude", "oob_tcp_if_exclude"):
        names = [f"!{name}" for name in value.split(",") if name and name not in ("lo", "127.0.0.1/8")]
        return (["--iface", ",".join(names)] if names else []), ""
    if key in ("plm_rsh_args", "plm_rsh_agent"):
        return ["--ssh", f"ssh {value}" if key == "plm_rsh_args" else value], ""
    if key == "rmaps_base_oversubscribe":
        return ["--oversubscribe"], ""
    if key == "hwloc_base_binding_policy":
        return _bind_to(value)
    if key in _MPI_TRANSPORT or key.startswith(("btl_", "pml_", "mtl_", "coll_")):
        return [], ""  # which of MPI's transports is used: ringcomm has its own
    return [], f"--mca {key} {value} has no effect: ringcomm does not use MPI"


_MPI_TRANSPORT = ("btl", "pml", "mtl", "coll", "oob", "orte_base_help_aggregate", "mpi_warn_on_fork")


def _forward_each(names: str) -> Tuple[List[str], str]:
    return [word for name in names.split(",") for word in ("-x", name)], ""


def _per_host(count: str) -> Tuple[List[str], str]:
    if not count.isdigit():
        return [], f"--nproc-per-node {count} is not done: give a number"
    return ["--slots-per-host", count], ""


def _timeline(path: str) -> Tuple[List[str], str]:
    # DYNAMIC permits start_timeline(), which is always permitted.
    return ([] if path == "DYNAMIC" else ["--timeline", path]), ""


def _megabytes(number: str) -> Tuple[List[str], str]:
    return ["--fusion-threshold", number if number == "0" else f"{number}M"], ""


# -- the table -------------------------------------------------------------------------------------

_FUNCTIONS = (
    (1, _per_host, "npernode N ppn perhost nproc-per-node ntasks-per-node repeat-hosts"),
    (2, _mca, "mca gmca omca prtemca"),
    (1, _map_by, "map-by rank-by"),
    (1, _bind_to, "bind-to"),
    (1, _forward_each, "genvlist envlist"),
    (1, _timeline, "timeline-filename"),
    (1, _megabytes, "fusion-threshold-mb"),
)
_WORDS = (
    (1, "-np {0}", "n c np num-processes ntasks"),
    (1, "-H {0}", "host hosts"),
    (1, "--hostfile {0}", "machinefile f default-hostfile"),
    (1, "--cwd {0}", "wdir wd workdir"),
    (1, "--restarts {0}", "max-restarts"),
    (1, "--output-dir {0}", "log-dir"),
    (1, "--threads {0}", "num-cpu-threads-per-process"),
    (1, "--late-after {0}", "stall-check-shutdown-time-seconds"),
    (1, "-x ACCELERATE_MIXED_PRECISION={0}", "mixed-precision"),
    (2, "-x {0}={1}", "genv env"),
    (0, "--no-env", "genvnone envnone"),
    (0, "--slots-per-host 1", "pernode"),
    (0, "--bind core", "bind-to-core bind-to-socket"),
    (0, "--bind none", "bind-to-none"),
    (0, "--late-after 0", "no-stall-check"),
)
_HOSTS = "nnodes nodes num-machines"
"""Options for a number of hosts, or a range, as in ``1:4``."""
_NO_TIME = "lines come without a time"
_TUNER = "has no effect: ringcomm does not tune itself"
_LOG = "has no effect: ringcomm logs through Python's logging; --verbose shows more"
_WITHOUT_EFFECT = (
    (0, "",
     "byslot allow-run-as-root nooversubscribe no-oversubscribe tag-output prepend-rank l genvall envall q "
     "quiet use-hwthread-cpus enable-recovery xterm no-python use-env standalone multi-gpu same-network gloo "
     "tcp disable-cache stall-check no-autotune no-hierarchical-allreduce no-hierarchical-allgather "
     "no-torus-allreduce mpi-threads-disable no-mpi-threads-disable"),
    (1, "",
     f"{_HOSTS} redirects monitor-interval role start-method rdzv-conf local-addr rdzv-backend rdzv-id "
     "dynamo-backend gpu-ids connections-per-ip starting-port nccl-port"),
    (0, "ranks fill the hosts in the order given, slot after slot", "bynode bysocket bycore"),
    (0, _NO_TIME, "timestamp-output timestamp"),
    (0, f"has no effect: {_NO_TIME}", "prefix-timestamp prefix-output-with-timestamp"),
    (0, "see --dry-run", "report-bindings display-map display-allocation"),
    (1, "see --dry-run", "display"),
    (1, "hosts are reached by ssh (--ssh)", "launcher bootstrap rmk"),
    (1, "a job of ringrun has no time limit", "timeout"),
    (1, "there is no MPI to find on the hosts: --prefix has no effect", "prefix"),
    (1, "that is MPI's", "report-pid report-uri am tune app mpi-arg"),
    (1, "the output of all ranks is shown", "tee"),
    (1, "ringrun starts the ranks of all hosts: run it once, on one of them",
     "rdzv-endpoint master-addr master-port node-rank machine-rank main-process-ip main-process-port"),
    (1, "ringrun allocates nothing; in a job of Slurm it takes its nodes",
     "gres gpus gpus-per-node gpus-per-task cpus-per-task partition mem"),
    (1, "the ranks are connected by ringcomm", "backend"),
    # horovodrun
    (0, "has no effect: ringcomm has no such algorithm",
     "hierarchical-allreduce hierarchical-allgather torus-allreduce"),
    (0, _TUNER, "autotune"),
    (1, _TUNER, "autotune-log-file autotune-warmup-samples autotune-steps-per-sample "
                "autotune-bayes-opt-max-samples autotune-gaussian-process-noise"),
    (0, "has no effect: the timeline has no cycles", "timeline-mark-cycles no-timeline-mark-cycles"),
    (2, "has no effect: a slot that failed is used again after 0, 1, 2, 4, … 30 s",
     "blacklist-cooldown-range"),
    (1, "has no effect: ringcomm's cache has a fixed size", "cache-capacity"),
    (1, "has no effect: ringrun reads ringrun.toml, and no other file of settings", "config-file"),
    (1, "has no effect: the ranks of an elastic job may change as often as they must", "reset-limit"),
    (1, "has no effect: an elastic job waits 600 s for enough slots", "elastic-timeout"),
    (1, "has no effect: a tensor waits for others for 1 ms at most", "cycle-time-ms"),
    (1, "has no effect: ringcomm warns after a tenth of --late-after", "stall-check-warning-time-seconds"),
    (1, "has no effect: --dead-after and --late-after limit how long ringcomm waits", "gloo-timeout-seconds"),
    (1, "has no effect: ringcomm does not use NCCL", "num-nccl-streams"),
    (1, "has no effect: ringcomm leaves its thread to the system's scheduler", "thread-affinity"),
    (1, _LOG, "log-level"),
    (0, _LOG, "log-with-timestamp log-without-timestamp log-hide-timestamp no-log-hide-timestamp"),
)  # fmt: skip
RULES: Dict[str, Rule] = {
    **{name: Rule(count, note=note) for count, note, names in _WITHOUT_EFFECT for name in names.split()},
    **{name: Rule(count, words) for count, words, names in _WORDS for name in names.split()},
    **{name: Rule(count, function=made) for count, made, names in _FUNCTIONS for name in names.split()},
}
"""By name without leading dashes, with hyphens inside."""
REFUSED = ("--mpi", "--jsrun", "--mpi-args", "--binding-args")
"""Options of horovodrun that are an error."""
NO_MPI = "ringcomm has no MPI; its own TCP links replace Horovod's Gloo. Leave it out."
_INTERFACES = ("--network-interface", "--network-interfaces")
"""Horovod's names of ``--iface``."""


def rule_of(option: str) -> Optional[Rule]:
    """Return the rule for an option of another launcher, or None."""
    return RULES.get(option.lstrip("-").replace("_", "-"))


def names() -> List[str]:
    """Return all options with an effect, with two hyphens (one letter: one)."""
    return sorted(f"-{name}" if len(name) == 1 else f"--{name}" for name in RULES if RULES[name].has_effect)


def translate(words: Sequence[str], own: Callable[[str], Optional[int]]) -> Translated:
    """Replace the options of other launchers in a command line by ringrun's, up to the first word that is not
    an option, ``--``, or an option that is unknown or lacks its values. `own` returns the number of values of
    a ringrun option, which keeps ringrun's meaning, and None for other words.
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
        rule = rule_of(name)
        if rule is None:
            break
        values = [value] if equals else list(words[position + 1 : position + 1 + rule.values])
        if name.lstrip("-") == "env" and "=" in "".join(values[:1]):  # mlx.launch has one value, MPICH two
            rule, values = Rule(1, "-x {0}"), values[:1]
        if len(values) < rule.values:
            break
        replaced, note = rule.apply(values)
        if name.lstrip("-").replace("_", "-") in _HOSTS.split() and values[0].partition(":")[0].isdigit():
            hosts = (name, int(values[0].partition(":")[0]))
        found += replaced
        if note:
            between = " " if note.startswith("has ") else ": "
            notes.append(note if note.startswith("--") else f"{word}{between}{note}")
        position += 1 + (0 if equals else rule.values)
    rest = list(words[position:])
    if rest and rest[0][:1] in _DASHES:
        rest[0] = _with_hyphens(rest[0])
    return Translated([*_joined_ifaces(found), *rest], notes, hosts)


def _with_hyphens(word: str) -> str:
    """Return the word with hyphens in place of dashes at its beginning."""
    bare = word.lstrip(_DASHES)
    return "-" * (len(word) - len(bare)) + bare


def _joined_ifaces(words: Sequence[str]) -> List[str]:
    """Merge several ``--iface`` for all hosts into one; Open MPI has one for each of two layers."""
    values: List[str] = []
    rest, position = list(words), 0
    while position < len(rest):
        value = rest[position + 1 : position + 2]
        if rest[position] == "--iface" and value and "=" not in value[0]:
            values += [item for item in value[0].split(",") if item not in values]
            del rest[position : position + 2]
        else:
            position += 1
    return [*(["--iface", ",".join(values)] if values else []), *rest]


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
"""Launchers whose options are all in :data:`RULES`."""
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
    """Return the command line of another launcher without its name; None if the command is none."""
    name = words[0] if words else ""
    if name in _INSTEAD:
        raise ConfigError(f"{name}: {_INSTEAD[name].format(name=name)}.")
    if name == "mlx.launch":
        return _renamed(name, words[1:])
    if name == "accelerate" and words[1:2] == ["launch"]:
        return _renamed(name, words[2:])
    start = 1 if re.fullmatch(r"(.*/)?python(3(\.\d+)?)?", name) else 0
    if list(words[start : start + 1]) == ["-m"] and "".join(words[start + 1 : start + 2]) in _TORCH:
        name, words = words[start + 1], words[start + 1 :]
    is_left_out = name in (*_LEFT_OUT, *_TORCH)
    return Translated(list(words[1:]), [f"{name} is left out: {_ITSELF}"]) if is_left_out else None


def _renamed(name: str, words: Sequence[str]) -> Translated:
    """Return the words after a launcher that has its own options."""
    rules = _RENAMED[name]
    found: List[str] = []
    unused: List[str] = []
    position = 0
    while position < len(words) and words[position].startswith("-") and found[-1:] != ["-m"]:
        option, equals, value = words[position].partition("=")
        known = rule_of(option)
        count, own = rules.get(option.replace("_", "-"), (known.values if known else 0, option))
        values = [value] if equals else list(words[position + 1 : position + 1 + count])
        position += 1 + (0 if equals else count)
        found += [own, *values] if own else []
        unused += [option] if count and not own else []
    more = f"; {', '.join(unused)}: nothing that ringrun needs" if unused else ""
    return Translated([*found, *words[position:]], [f"{name} is left out: {_ITSELF}{more}"])
