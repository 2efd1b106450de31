"""The environment variables of the ranks. Pure: from an environment and options to dictionaries.

Ranks on this machine inherit the launcher's environment. Ranks on other hosts get ringcomm's settings, the
variables of the launching shell that do not belong to a machine or a login (:data:`NOT_FORWARDED`), and
those that ``-x`` names. The key, and variables of an enclosing job, are never passed on.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Dict, List, Mapping, Sequence

from ringcomm.config import PREFIX, Settings, tunables
from ringcomm.configuration.membership import MEMBERSHIP_VARIABLES
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

NOT_FORWARDED = (
    ("the shell and its folders", "PATH MANPATH CDPATH HOME SHELL SHLVL PWD OLDPWD TMPDIR TMP TEMP MAIL IFS "
     "ENV BASH* SHELLOPTS ZDOTDIR EDITOR VISUAL PAGER _"),
    ("the login and the host", "USER LOGNAME USERNAME HOST HOSTNAME HOSTTYPE SSH_* GIT_SSH* GPG_* SUDO_* "
     "XDG_* DBUS_* KRB5CCNAME NOTIFY_SOCKET JOURNAL_STREAM INVOCATION_ID KUBERNETES_*"),
    ("the terminal and the language", "TERM TERM_* TERMINFO* TERMCAP COLORTERM COLUMNS LINES DISPLAY "
     "WAYLAND_DISPLAY XAUTHORITY WINDOWID TMUX* STY VSCODE_* JPY_* LANG LANGUAGE LC_* TZ"),
    ("what programs load at a path", "LD_* DYLD_* PYTHON* VIRTUAL_ENV* CONDA_* _CE_* MAMBA_* PYENV_* "
     "OMP_TOOL_LIBRARIES GCONV_PATH MODULEPATH MODULESHOME LOADEDMODULES _LMFILES_ LMOD_* SSL_CERT_* "
     "REQUESTS_CA_BUNDLE CURL_CA_BUNDLE"),
    ("devices", "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES "
     "GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK"),
    ("schedulers", "SLURM* SBATCH_* SALLOC_* SRUN_* PBS_* LSB_* LSF_* SGE_* PE_HOSTFILE OAR_* COBALT_* "
     "FLUX_*"),
    ("ranks and their launchers", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE "
     "NODE_RANK ROLE_* MASTER_ADDR MASTER_PORT TORCHELASTIC_* RINGCOMM_* OMPI_* PRTE_* "
     "PMI_* PMIX_* HYDI_* HYDRA_* MPI_LOCAL*"),
)  # fmt: skip
"""Variables that belong to one machine, login or rank, by their purpose: other hosts do not get them unless
``-x`` names them. ringrun passes ringcomm's settings itself."""
_NOT_FORWARDED = re.compile(
    "|".join(fnmatch.translate(name) for _, names in NOT_FORWARDED for name in names.split())
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def setting_variables() -> List[str]:
    """Return the variables of :class:`ringcomm.config.Settings`."""
    return [item.metadata["variable"] for item in tunables()]


def removed() -> List[str]:
    """Return the variables that the agent removes from its environment before it adds the rank's."""
    return [*MEMBERSHIP, *setting_variables(), *horovod.IDENTITY, "HOROVOD_ELASTIC", *OTHER_IDENTITIES]


def rank_variables(place: Place, size: int, host: str, as_horovod: bool = False) -> Dict[str, str]:
    """Return the variables that torchrun sets for a rank but MASTER_*, and Horovod's if `as_horovod`."""
    common = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.host_index),
        "NODE_RANK": str(place.host_index),  # for Lightning and Composer; not torchrun's
    }
    return {**common, **(horovod.rank_variables(place, size, host) if as_horovod else {})}


def of_the_shell(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables of the launching shell that ranks on other hosts get without ``-x``."""
    skip = {*removed(), "_HOROVOD_SECRET_KEY"}
    return {
        name: value for name, value in environ.items() if name not in skip and not _NOT_FORWARDED.match(name)
    }


def forwarded(requests: Sequence[str], environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that ``-x`` selects by name, with a value, or by a pattern."""
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
            if "\0" in found[key]:
                raise ConfigError(f"-x {key}: the value has a NUL character, which no variable can have.")
        chosen.update(found)
    return chosen


def not_forwarded(requests: Sequence[str], environ: Mapping[str, str]) -> List[str]:
    """Return a message for each ``-x`` that selects no variable."""
    return [
        f"-x {request}: no variable of this name is set here; -x NAME=VALUE sets one."
        for request in requests
        if not forwarded([request], environ)
    ]


def own_variables(settings: Settings, environ: Mapping[str, str]) -> Dict[str, str]:
    """Return ringcomm's settings for every rank, and other ``RINGCOMM_*`` variables that the user has set."""
    skip = set(removed())
    kept = {key: value for key, value in environ.items() if key.startswith(PREFIX) and key not in skip}
    kept = {key: value for key, value in kept.items() if not key.startswith(PREFIX + "KEY")}
    return {**kept, **settings.to_environment()}
