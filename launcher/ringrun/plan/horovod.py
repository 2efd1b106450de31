"""Horovod's variables under ``ringrun --horovod``: those that are settings, and those of a rank. Pure.

horovodrun's flags are in :mod:`.launchers`.
"""

from __future__ import annotations

import json
from typing import Callable, Dict, List, Mapping, Optional, Tuple

from ringcomm.configuration.settings import SettingValue

from .ranks import Place


def _timeline(text: str) -> Optional[str]:
    return None if text == "DYNAMIC" else text  # DYNAMIC permits start_timeline(), which is always permitted


def _is_true(text: str) -> bool:
    return text.strip().lower() not in ("", "0", "false", "no", "off")


def _off_if_true(text: str) -> Optional[str]:
    return "0" if _is_true(text) else None


SETTINGS: Dict[str, Tuple[str, Callable[[str], Optional[str]]]] = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_bytes", str),
    "HOROVOD_TIMELINE": ("timeline", _timeline),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("late_after_s", str),
    # After the shutdown time, which it overrides.
    "HOROVOD_STALL_CHECK_DISABLE": ("late_after_s", _off_if_true),
    "HOROVOD_START_TIMEOUT": ("start_timeout_s", str),
    "HOROVOD_GLOO_IFACE": ("iface", str),
}
"""The field that a variable sets, and the conversion of its text; None leaves the setting unchanged."""
_WITHOUT_EFFECT = {
    "HOROVOD_AUTOTUNE": "ringcomm does not tune itself",
    "HOROVOD_CYCLE_TIME": "a tensor waits for others for 1 ms at most",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "ringcomm warns after a tenth of --late-after",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "--dead-after and --late-after limit how long ringcomm waits",
    "HOROVOD_ELASTIC_TIMEOUT": "an elastic job waits 600 s for enough slots",
}
"""Variables that ask for what ringcomm does not do, with the reason."""


def without_effect(environ: Mapping[str, str]) -> List[str]:
    """Return lines about ``HOROVOD_*`` variables that request something ringcomm does not do."""
    given = [name for name in _WITHOUT_EFFECT if _is_true(environ.get(name, ""))]
    return [f"{name} has no effect: {_WITHOUT_EFFECT[name]}." for name in given]


def from_environment(environ: Mapping[str, str]) -> List[SettingValue]:
    """Return the settings that ``HOROVOD_*`` variables set under ``--horovod``."""
    found = []
    for variable, (setting, convert) in SETTINGS.items():
        text = environ.get(variable, "")
        converted = convert(text) if text else None
        if converted is not None:
            found.append(SettingValue(setting, converted, f"{variable}={text!r}", variable))
    return found


COUNTED = "HOROVOD_COUNTED_BY_RINGRUN"
"""The variable with the ``HOROVOD_*`` variables and values that ringrun has applied, as JSON."""


def counted(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variable by which ranks distinguish variables set by the program from the user's."""
    return {COUNTED: json.dumps({name: environ[name] for name in sorted(SETTINGS) if name in environ})}


def from_program(environ: Mapping[str, str]) -> List[SettingValue]:
    """Return the settings of ``HOROVOD_*`` variables that a program has set since ringrun started it."""
    before = json.loads(environ.get(COUNTED, "{}"))
    return from_environment({name: text for name, text in environ.items() if before.get(name) != text})


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
