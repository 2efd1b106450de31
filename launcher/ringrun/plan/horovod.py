"""Horovod's names for ringcomm's settings: its flags and its variables. Pure.

Only this module lists them. Variables apply only under ``ringrun --horovod``; flags apply
always.
"""

from __future__ import annotations

import json
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional

from ringcomm.configuration.settings import SettingValue

from .ranks import Place

Convert = Callable[[str], Optional[str]]
"""Converts a text from Horovod's unit to ringcomm's; None leaves the setting unchanged."""


class Name(NamedTuple):
    """One of Horovod's tunables; `flag`, `variable` and `key` are "" if missing, or ringrun's is the same."""

    setting: str  # the field that it sets
    flag: str
    variable: str
    convert: Convert  # from the unit of the flag
    convert_variable: Convert
    is_flag: bool = False  # the flag takes no value


def _megabytes(text: str) -> str:
    return "0" if text.strip() == "0" else text.strip() + "M"


def _timeline(text: str) -> Optional[str]:
    return None if text == "DYNAMIC" else text  # DYNAMIC permits start_timeline(), which is always permitted


def _is_true(text: str) -> bool:
    return text.strip().lower() not in ("", "0", "false", "no", "off")


def _off_if_true(text: str) -> Optional[str]:
    return "0" if _is_true(text) else None


NAMES = (
    Name("fusion_bytes", "--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", _megabytes, str),
    Name("timeline", "--timeline-filename", "HOROVOD_TIMELINE", _timeline, _timeline),
    Name("late_after_s", "--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
         str, str),
    # Listed after the shutdown time, so that it overrides that of the same source.
    Name("late_after_s", "--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", _off_if_true, _off_if_true, True),
    Name("start_timeout_s", "", "HOROVOD_START_TIMEOUT", str, str),
    Name("iface", "", "HOROVOD_GLOO_IFACE", str, str),
)  # fmt: skip

NO_MPI = "ringcomm has no MPI; its own TCP links replace Horovod's Gloo. Leave it out."
_HIERARCHY = "ringcomm has no such algorithm"
_TUNER = "ringcomm does not tune itself"
_LOG = "ringcomm logs through Python's logging; --verbose shows more"
_CYCLE = "a tensor waits for others for 1 ms at most"
_WARNING = "ringcomm warns after a tenth of --late-after"
_SILENCE = "--dead-after and --late-after limit how long ringcomm waits"
_SLOTS = "an elastic job waits 600 s for enough slots"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("--mpi", "--jsrun"), NO_MPI),
    **dict.fromkeys(("--mpi-args", "--binding-args"), NO_MPI),
}
"""horovodrun's flags that ringrun refuses, with the reason."""

IGNORED: Mapping[str, str] = {
    **dict.fromkeys(("--gloo", "--disable-cache", "--stall-check", "--tcp"), ""),
    **dict.fromkeys(
        ("--hierarchical-allreduce", "--hierarchical-allgather", "--torus-allreduce"), _HIERARCHY
    ),
    **dict.fromkeys(("--no-hierarchical-allreduce", "--no-hierarchical-allgather"), ""),
    **dict.fromkeys(("--no-torus-allreduce", "--no-mpi-threads-disable", "--mpi-threads-disable"), ""),
    **dict.fromkeys(("--autotune", "--autotune-log-file"), _TUNER),
    "--no-autotune": "",
    **dict.fromkeys(("--autotune-warmup-samples", "--autotune-steps-per-sample"), _TUNER),
    **dict.fromkeys(("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"), _TUNER),
    **dict.fromkeys(("--timeline-mark-cycles", "--no-timeline-mark-cycles"), "the timeline has no cycles"),
    "--blacklist-cooldown-range": "a slot that failed is used again after 0, 1, 2, 4, … 30 s",
    "--cache-capacity": "ringcomm's cache has a fixed size",
    "--config-file": "ringrun reads ringrun.toml, and no other file of settings",
    "--reset-limit": "the ranks of an elastic job may change as often as they must",
    "--elastic-timeout": _SLOTS,
    "--cycle-time-ms": _CYCLE,
    "--stall-check-warning-time-seconds": _WARNING,
    "--gloo-timeout-seconds": _SILENCE,
    "--num-nccl-streams": "ringcomm does not use NCCL",
    "--thread-affinity": "ringcomm leaves its thread to the system's scheduler",
    "--log-level": _LOG,
    **dict.fromkeys(("--log-with-timestamp", "--log-without-timestamp"), _LOG),
    **dict.fromkeys(("--log-hide-timestamp", "--no-log-hide-timestamp"), _LOG),
    **dict.fromkeys(("-prefix-timestamp", "--prefix-output-with-timestamp"), "lines come without a time"),
}
"""horovodrun's flags without effect here; ringrun prints the reason if there is one."""

VALUES: Mapping[str, int] = {
    **dict.fromkeys(("--mpi-args", "--binding-args"), 1),
    **dict.fromkeys(("--num-nccl-streams", "--thread-affinity", "--log-level", "--cache-capacity"), 1),
    **dict.fromkeys(("--config-file", "--reset-limit", "--elastic-timeout", "--cycle-time-ms"), 1),
    **dict.fromkeys(("--stall-check-warning-time-seconds", "--gloo-timeout-seconds"), 1),
    "--autotune-log-file": 1, "--blacklist-cooldown-range": 2,
    **dict.fromkeys(("--autotune-warmup-samples", "--autotune-steps-per-sample"), 1),
    **dict.fromkeys(("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"), 1),
}
"""Number of values that flags of :data:`REFUSED` and :data:`IGNORED` take; flags not listed take none."""

_WITHOUT_EFFECT = {
    "HOROVOD_AUTOTUNE": _TUNER, "HOROVOD_CYCLE_TIME": _CYCLE, "HOROVOD_STALL_CHECK_TIME_SECONDS": _WARNING,
    "HOROVOD_GLOO_TIMEOUT_SECONDS": _SILENCE, "HOROVOD_ELASTIC_TIMEOUT": _SLOTS,
}  # fmt: skip
"""Variables that ask for what ringcomm does not do, with the reason."""


def without_effect(environ: Mapping[str, str]) -> List[str]:
    """Return lines about ``HOROVOD_*`` variables that request something ringcomm does not do."""
    given = [name for name in _WITHOUT_EFFECT if _is_true(environ.get(name, ""))]
    return [f"{name} has no effect: {_WITHOUT_EFFECT[name]}." for name in given]


def from_environment(environ: Mapping[str, str]) -> List[SettingValue]:
    """Return the settings that ``HOROVOD_*`` variables set under ``--horovod``."""
    found = []
    for name in NAMES:
        text = environ.get(name.variable, "") if name.variable else ""
        converted = name.convert_variable(text) if text else None
        if converted is not None:
            found.append(SettingValue(name.setting, converted, f"{name.variable}={text!r}", name.variable))
    return found


COUNTED = "HOROVOD_COUNTED_BY_RINGRUN"
"""The variable with the ``HOROVOD_*`` variables and values that ringrun has applied, as JSON."""


def counted(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variable by which ranks distinguish variables set by the program from the user's."""
    names = {name.variable for name in NAMES}
    return {COUNTED: json.dumps({name: environ[name] for name in sorted(names) if name in environ})}


def from_program(environ: Mapping[str, str]) -> List[SettingValue]:
    """Return the settings of ``HOROVOD_*`` variables that a program has set since ringrun started it.

    ringrun has already merged the other variables with options and ``RINGCOMM_*`` variables.
    """
    before = json.loads(environ.get(COUNTED, "{}"))
    changed = {name: text for name, text in environ.items() if before.get(name) != text}
    return from_environment(changed)


def rank_variables(place: Place, size: int, host: str) -> Dict[str, str]:
    """Return the variables that Horovod's launcher sets for each rank, for scripts that read them."""
    return {
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(place.cross_rank),
        "HOROVOD_CROSS_SIZE": str(place.cross_size),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


IDENTITY = tuple(rank_variables(Place(0, 0, 0, 1, 0, 1), 1, ""))
"""The variables of :func:`rank_variables`; a job inside another must not inherit them."""
