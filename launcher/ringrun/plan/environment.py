"""Settings and environment variables of the ranks. Pure: from an environment and options to dictionaries.

Every source of settings is parsed into :class:`ringcomm.configuration.settings.SettingValue`, and merged
there. Ranks on this machine inherit the launcher's environment. Ranks on other hosts get ringcomm's settings,
the variables of the launching shell that do not belong to a machine or a login (:data:`NOT_FORWARDED`), and
those that ``-x`` names. The key, and variables of an enclosing job, are never passed on.
"""

from __future__ import annotations

import fnmatch
import json
import numbers
import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ringcomm.config import PREFIX, Settings, tunables
from ringcomm.configuration.membership import MEMBERSHIP_VARIABLES
from ringcomm.configuration.settings import Effective, SettingValue
from ringcomm.errors import ConfigError

from .launchers import RULES
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
    ("files that programs load", "LD_* DYLD_* PYTHON* VIRTUAL_ENV* CONDA_* _CE_* MAMBA_* PYENV_* "
     "OMP_TOOL_LIBRARIES GCONV_PATH MODULEPATH MODULESHOME LOADEDMODULES _LMFILES_ LMOD_* SSL_CERT_* "
     "REQUESTS_CA_BUNDLE CURL_CA_BUNDLE"),
    ("which GPUs to use", "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES "
     "ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK"),
    ("jobs of a scheduler", "SLURM* SBATCH_* SALLOC_* SRUN_* PBS_* LSB_* LSF_* SGE_* PE_HOSTFILE OAR_* "
     "COBALT_* FLUX_*"),
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


def removed() -> List[str]:
    """Return the variables that the agent removes from its environment before it adds the rank's."""
    settings = [item.metadata["variable"] for item in tunables()]
    return [*MEMBERSHIP, *settings, *HOROVOD_IDENTITY, "HOROVOD_ELASTIC", *OTHER_IDENTITIES]


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
    return {**common, **(horovod_rank_variables(place, size, host) if as_horovod else {})}


def horovod_rank_variables(place: Place, size: int, host: str) -> Dict[str, str]:
    """Return the variables that Horovod's launcher sets for each rank, for scripts that read them."""
    values = {
        "RANK": place.rank, "SIZE": size, "LOCAL_RANK": place.local_rank, "LOCAL_SIZE": place.local_size,
        "CROSS_RANK": place.cross_rank, "CROSS_SIZE": place.cross_size, "HOSTNAME": host,
        "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo",
    }  # fmt: skip
    return {f"HOROVOD_{name}": str(value) for name, value in values.items()}


HOROVOD_IDENTITY = tuple(horovod_rank_variables(Place(0, 0, 0, 1, 0, 1), 1, ""))
"""Variables of one rank; a job inside another must not inherit them."""


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
            keys = (key for key in environ if fnmatch.fnmatchcase(key, name))
            found = {key: environ[key] for key in keys if key not in MEMBERSHIP}
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
    empty = (name for name in requests if not forwarded([name], environ))
    return [f"-x {name}: no variable of this name is set here; -x NAME=VALUE sets one." for name in empty]


def own_variables(settings: Settings, environ: Mapping[str, str]) -> Dict[str, str]:
    """Return ringcomm's settings for every rank, and other ``RINGCOMM_*`` variables that the user has set."""
    skip = set(removed())
    kept = {
        key: value for key, value in environ.items()
        if key.startswith(PREFIX) and key not in skip and not key.startswith(PREFIX + "KEY")
    }  # fmt: skip
    return {**kept, **settings.to_environment()}


# -- settings -------------------------------------------------------------------------------------


def from_values(values: Mapping[str, Any]) -> Tuple[SettingValue, ...]:
    """Return the settings of a dictionary by option names (with dashes or underscores) or field names."""
    defaults = {item.name: item.default for item in tunables()}
    options = {item.metadata["flag"][2:].replace("-", "_"): item.name for item in tunables()}
    found: Dict[str, Any] = {}
    for key, value in values.items():
        plain = key.replace("-", "_")
        name = options.get(plain, plain)
        if name not in defaults:
            raise ConfigError(f"There is no setting {key!r}. The settings are: {', '.join(sorted(options))}.")
        if isinstance(value, bool) and not isinstance(defaults[name], bool):
            raise ConfigError(f"{name}={value!r}: this setting does not take True or False.")
        if isinstance(defaults[name], float) and not isinstance(value, numbers.Real):
            raise ConfigError(f"{name}={value!r} is not a number.")
        found[name] = value
    return tuple(
        SettingValue(name, str(int(value) if isinstance(value, bool) else value), f"{name}={value!r}", name)
        for name, value in found.items()
    )


def shown_value(setting: str, value: Any) -> str:
    """Return a value in the shortest form that its parser takes."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if setting.endswith("_bytes"):
        for exponent, unit in ((3, "G"), (2, "M"), (1, "K")):
            if value and value % 1024**exponent == 0:
                return f"{value // 1024**exponent}{unit}"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def rows_of(found: Effective) -> List[Tuple[str, str, str]]:
    """Return the name, value and source of every setting."""
    return [
        (item.metadata["flag"][2:], shown_value(item.name, getattr(found.settings, item.name)) or '""',
         found.sources.get(item.name, "default"))
        for item in tunables()
    ]  # fmt: skip


# -- Horovod's variables under ``ringrun --horovod`` (its flags are in :mod:`.launchers`) -----------


def _is_true(text: str) -> bool:
    return text.strip().lower() not in ("", "0", "false", "no", "off")


HOROVOD_SETTINGS: Dict[str, Tuple[str, Callable[[str], Optional[str]]]] = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_bytes", str),
    # DYNAMIC permits start_timeline(), which is always permitted.
    "HOROVOD_TIMELINE": ("timeline", lambda text: None if text == "DYNAMIC" else text),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("late_after_s", str),
    # After the shutdown time, which it overrides.
    "HOROVOD_STALL_CHECK_DISABLE": ("late_after_s", lambda text: "0" if _is_true(text) else None),
    "HOROVOD_START_TIMEOUT": ("start_timeout_s", str),
    "HOROVOD_GLOO_IFACE": ("iface", str),
}
"""The field that a variable sets, and the conversion of its text; None leaves the setting unchanged."""
_WITHOUT_EFFECT = {
    "HOROVOD_AUTOTUNE": "autotune",
    "HOROVOD_CYCLE_TIME": "cycle-time-ms",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "stall-check-warning-time-seconds",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "gloo-timeout-seconds",
    "HOROVOD_ELASTIC_TIMEOUT": "elastic-timeout",
}
"""Variables that ask for what ringcomm does not do, with the option of horovodrun for the same."""


def horovod_without_effect(environ: Mapping[str, str]) -> List[str]:
    """Return lines about ``HOROVOD_*`` variables that request something ringcomm does not do."""
    given = [name for name in _WITHOUT_EFFECT if _is_true(environ.get(name, ""))]
    return [f"{name} {RULES[_WITHOUT_EFFECT[name]].note}." for name in given]


def horovod_settings(environ: Mapping[str, str]) -> List[SettingValue]:
    """Return the settings that ``HOROVOD_*`` variables set under ``--horovod``."""
    found = []
    for variable, (setting, convert) in HOROVOD_SETTINGS.items():
        text = environ.get(variable, "")
        converted = convert(text) if text else None
        if converted is not None:
            found.append(SettingValue(setting, converted, f"{variable}={text!r}", variable))
    return found


COUNTED = "HOROVOD_COUNTED_BY_RINGRUN"
"""The variable with the ``HOROVOD_*`` variables and values that ringrun has applied, as JSON."""


def horovod_counted(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variable by which ranks distinguish variables set by the program from the user's."""
    given = {name: environ[name] for name in sorted(HOROVOD_SETTINGS) if name in environ}
    return {COUNTED: json.dumps(given)}


def horovod_settings_of_program(environ: Mapping[str, str]) -> List[SettingValue]:
    """Return the settings of ``HOROVOD_*`` variables that a program has set since ringrun started it."""
    before = json.loads(environ.get(COUNTED, "{}"))
    return horovod_settings({name: text for name, text in environ.items() if before.get(name) != text})
