"""The environment variables of the ranks. Pure: from an environment and options to dictionaries.

Ranks on this machine inherit the launcher's environment. Ranks on other hosts get ringcomm's settings and
the variables that ``-x`` names. The key, and variables of an enclosing job, are never passed on.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import fields
from typing import Dict, List, Mapping, Sequence

from ringcomm.config import PREFIX, Settings
from ringcomm.configuration.variables import MEMBERSHIP_VARIABLES
from ringcomm.errors import ConfigError

from . import horovod
from .ranks import Place

MEMBERSHIP = tuple(PREFIX + name for name, _ in MEMBERSHIP_VARIABLES if name != "SHARED_DIR")
"""Variables that describe a process's part in *one* job; a job inside another must not inherit them."""

OTHER_IDENTITIES = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GTIDS",
    "SLURM_STEPID", "SLURM_TASK_PID", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION",
    "SLURM_LAUNCH_NODE_IPADDR", "SLURM_CPU_BIND", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDI_CONTROL_FD",
    "OMPI_APP_CTX_NUM_PROCS", "OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX", "OMPI_UNIVERSE_SIZE", "OMPI_COMMAND",
    "OMPI_ARGV", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_ess_base_vpid",
)  # fmt: skip
OTHER_LAUNCHERS = ("SLURM_STEP_", "SLURM_SRUN_", "SLURM_CPU_BIND_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")
"""Beginnings of variables, like the names in :data:`OTHER_IDENTITIES`, by which srun and mpirun number their
own processes. An agent is one task of a step; its ranks would take themselves for that task."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def setting_variables() -> List[str]:
    """The variables of :class:`ringcomm.config.Settings`."""
    return [item.metadata["variable"] for item in fields(Settings)]


def removed() -> List[str]:
    """Variables that the agent removes from its environment before it adds the rank's own."""
    return [*MEMBERSHIP, *setting_variables(), *horovod.IDENTITY, "HOROVOD_ELASTIC", *OTHER_IDENTITIES]


def rank_variables(place: Place, size: int, host: str, as_horovod: bool = False) -> Dict[str, str]:
    """The variables that torchrun sets for a rank, and Horovod's on request.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are added when every host is ready
    (:func:`ringrun.job.rendezvous.master_variables`).

    Args:
        place: the rank, its local rank and their sizes.
        size: number of ranks.
        host: name of the rank's host.
        as_horovod: whether to add ``HOROVOD_*`` variables.
    """
    common = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.host_index),
        "NODE_RANK": str(place.host_index),  # for Lightning and Composer; not torchrun's
    }
    return {**common, **(horovod.rank_variables(place, size, host) if as_horovod else {})}


def forwarded(requests: Sequence[str], environ: Mapping[str, str]) -> Dict[str, str]:
    """The variables that ``-x`` selects: ``NAME``, ``NAME=VALUE`` or a pattern like ``'NCCL_*'``.

    A name that is not set here, or a pattern without a match, selects nothing; :func:`not_forwarded` lists
    these.

    Raises:
        ConfigError: a request has no such form, or names a variable that ringrun sets itself.
    """
    chosen: Dict[str, str] = {}
    for request in requests:
        name, equals, value = request.partition("=")
        if equals:
            if not _NAME.match(name):
                raise ConfigError(f"-x {request!r}: {name!r} is not a variable name. Write -x NAME=VALUE.")
            found = {name: value}
        elif any(wildcard in name for wildcard in "*?["):
            found = {key: environ[key] for key in environ if fnmatch.fnmatchcase(key, name)}
            found = {key: found[key] for key in found if key not in MEMBERSHIP}
        elif name in environ:
            found = {name: environ[name]}
        elif _NAME.match(name):
            found = {}
        else:
            raise ConfigError(f"-x {request!r} is neither NAME, NAME=VALUE nor a pattern like 'PREFIX_*'.")
        for key in found:
            if key in MEMBERSHIP:
                raise ConfigError(f"-x {key}: ringrun sets it for every rank; it cannot be passed on.")
        chosen.update(found)
    return chosen


def not_forwarded(requests: Sequence[str], environ: Mapping[str, str]) -> List[str]:
    """A message for each ``-x`` that selects no variable."""
    found: List[str] = []
    for request in requests:
        if not forwarded([request], environ):
            if _NAME.match(request):
                text = f"-x {request}: no such variable is set here, so ranks do not get it. To set it, write"
                found.append(f"{text} -x {request}=VALUE.")
            else:
                found.append(f"-x {request!r}: no variable that is set here matches.")
    return found


def own_variables(settings: Settings, environ: Mapping[str, str]) -> Dict[str, str]:
    """ringcomm's settings for every rank, and other ``RINGCOMM_*`` variables that the user has set."""
    skip = set(removed())
    kept = {key: value for key, value in environ.items() if key.startswith(PREFIX) and key not in skip}
    kept = {key: value for key, value in kept.items() if not key.startswith(PREFIX + "KEY")}
    return {**kept, **settings.to_environment()}


def horovods_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """The user's ``HOROVOD_*`` variables, which ranks on other hosts get under ``--horovod``."""
    return {
        key: value for key, value in environ.items()
        if key.startswith("HOROVOD_") and key not in horovod.IDENTITY and "KEY" not in key
    }  # fmt: skip
