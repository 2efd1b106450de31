"""The hosts that a scheduler has given to this job, from its variables and host files. Pure: files are read
through a function that is passed in.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Callable, List, Mapping, NamedTuple, Optional, Tuple

from ringcomm.errors import ConfigError

from .hosts import HostSpec, check_host, parse_hostfile

Read = Callable[[str, str], str]
"""Reads a file, from its kind (for messages) and its path. Raises ConfigError."""
MAX_HOSTS = 1 << 16
_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")
_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]+\])+")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?\Z")


class Allocation(NamedTuple):
    """Hosts that belong to the surrounding job of a scheduler."""

    title: str  # the scheduler and its job, for messages
    hosts: Tuple[HostSpec, ...]
    job: str = ""  # Slurm's job number, whose hosts are reached by srun; "" for ssh
    here: str = ""  # the scheduler's name of this machine, or ""
    may_appear: bool = False  # hosts may still be starting
    is_stated: bool = True  # a number of tasks was requested; otherwise -np may be larger

    def has(self, spec: HostSpec) -> bool:
        return spec.name in {host.name for host in self.hosts}

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


HOSTFILE_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
)  # fmt: skip
"""Set by the MPI Operator of Kubernetes and by Kubeflow's runtimes for MPI."""


def _operator(environ: Mapping[str, str], read: Read) -> Optional[Allocation]:
    for variable in HOSTFILE_VARIABLES:
        path = environ.get(variable, "")
        if path:
            hosts = tuple(parse_hostfile(read(f"hostfile of {variable}", path), path))
            return Allocation(f"{path} ({variable})", hosts, may_appear=True)
    return None


_STARTED = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)


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
        if not _ITEM.fullmatch(item):
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
        found = _RANGE.match(part.strip())
        if found is None:
            raise _bad(text)
        first, last = found.group(1), found.group(2) or found.group(1)
        if not 0 <= int(last) - int(first) <= MAX_HOSTS:
            raise _bad(text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def tasks_per_node(text: str) -> List[int]:
    """Return the numbers in a list like ``3,1`` or ``2(x2),1``; ConfigError for another form."""
    counts: List[int] = []
    for part in text.split(","):
        found = _COUNT.match(part.strip())
        if found is None or int(found.group(2) or 1) > MAX_HOSTS:
            raise ConfigError(f"{text!r:.80} is not a list of tasks per node like '2(x3),1'.")
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    return counts


def _bad(text: str) -> ConfigError:
    return ConfigError(f"{text!r:.80} is not a list of nodes like 'n[01-03],gpu1': give hosts with -H.")
