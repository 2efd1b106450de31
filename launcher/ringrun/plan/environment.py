"""Which variables the ranks get. Pure: an environment and options go in, dictionaries come out.

Ranks on this machine inherit everything. Elsewhere only ringcomm's own settings are passed on, and
what ``-x`` names. Never the key, and never what belongs to a job around this one.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import fields
from typing import Dict, List, Mapping, Sequence

from ringcomm.config import PREFIX, Settings
from ringcomm.errors import ConfigError

from . import horovod
from .ranks import Place

_IN_ONE_JOB = (
    "SIZE", "RENDEZVOUS", "RENDEZVOUS_MACHINE", "RANK", "KEY", "KEY_FILE", "KEY_FD", "JOB", "HOST", "SLOT",
    "MASTER", "FLIGHT_FD", "RESTART",
)  # fmt: skip
MEMBERSHIP = tuple(PREFIX + name for name in _IN_ONE_JOB)
"""What says how a process takes part in *one* job; a job inside another must not inherit it."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def setting_variables() -> List[str]:
    """The variables of :class:`ringcomm.config.Settings`."""
    return [item.metadata["variable"] for item in fields(Settings)]


def removed() -> List[str]:
    """Variables that every rank loses before it is given its own."""
    return [*MEMBERSHIP, *setting_variables(), *horovod.IDENTITY]


def rank_variables(place: Place, size: int, host: str, as_horovod: bool = False) -> Dict[str, str]:
    """What other launchers tell a rank, too: torchrun, and Horovod's if asked for.

    ``MASTER_ADDR`` and ``MASTER_PORT`` follow when every host has answered.
    """
    common = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
    }
    return {**common, **(horovod.rank_variables(place, size, host) if as_horovod else {})}


def forwarded(requests: Sequence[str], environ: Mapping[str, str]) -> Dict[str, str]:
    """What ``-x`` asks for: ``NAME``, ``NAME=VALUE`` or a pattern like ``'NCCL_*'``.

    A name that is not set here, and a pattern that nothing fits, give nothing; see :func:`not_forwarded`.

    Raises:
        ConfigError: a request has no such form, or names a key.
    """
    chosen: Dict[str, str] = {}
    for request in requests:
        name, equals, value = request.partition("=")
        if equals:
            if not _NAME.match(name):
                raise ConfigError(f"-x {request!r}: {name!r} is not a variable name. Write -x NAME=VALUE.")
            found = {name: value}
        elif any(sign in name for sign in "*?["):
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
                raise ConfigError(f"-x {key}: ringrun gives every rank its own; it cannot be passed on.")
        chosen.update(found)
    return chosen


def not_forwarded(requests: Sequence[str], environ: Mapping[str, str]) -> List[str]:
    """A sentence for each ``-x`` that passes on nothing."""
    found: List[str] = []
    for request in requests:
        if not forwarded([request], environ):
            if _NAME.match(request):
                text = f"-x {request}: no such variable is set here, so ranks do not get it. To set it, write"
                found.append(f"{text} -x {request}=VALUE.")
            else:
                found.append(f"-x {request!r}: no variable that is set here fits.")
    return found


def own_variables(settings: Settings, environ: Mapping[str, str]) -> Dict[str, str]:
    """ringcomm's settings for every rank, and any other ``RINGCOMM_*`` that the user has set."""
    skip = set(removed())
    kept = {key: value for key, value in environ.items() if key.startswith(PREFIX) and key not in skip}
    kept = {key: value for key, value in kept.items() if not key.startswith(PREFIX + "KEY")}
    return {**kept, **settings.to_environment()}


def horovods_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Under ``--horovod`` scripts elsewhere see the user's ``HOROVOD_*`` variables, too."""
    return {
        key: value for key, value in environ.items()
        if key.startswith("HOROVOD_") and key not in horovod.IDENTITY and "KEY" not in key
    }  # fmt: skip
