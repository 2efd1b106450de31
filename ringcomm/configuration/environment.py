"""The variables of this process: those of the environment, or those assigned in their place."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Dict, Iterator, Mapping, Optional

from .variables import MEMBERSHIP_VARIABLES

PREFIX = "RINGCOMM_"

_assigned: Dict[str, str] = {}


def variables(environ: Optional[Mapping[str, str]]) -> Mapping[str, str]:
    """Return ``environ``, else the variables assigned to this process, else those of the environment."""
    if environ is not None:
        return environ
    if not _assigned:
        return os.environ
    replaced = {PREFIX + name for name, _ in MEMBERSHIP_VARIABLES}
    return {**{name: value for name, value in os.environ.items() if name not in replaced}, **_assigned}


def assign(variables: Mapping[str, str]) -> None:
    """Give this process its part in a job without a launcher, as Ray, Dask and Spark do.

    The ``RINGCOMM_*`` variables take the place of those in the environment, but are not written to it: child
    processes do not inherit them, in particular not the key. No variables: read the environment again.
    """
    global _assigned
    _assigned = dict(variables)


def export(variables: Mapping[str, Optional[str]]) -> None:
    """Set variables of this process, for the user's function and its child processes; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def exported(variables: Mapping[str, Optional[str]]) -> Iterator[None]:
    """Set variables as :func:`export` does, within a ``with`` block."""
    before = {name: os.environ.get(name) for name in variables}
    export(variables)
    try:
        yield
    finally:
        export(before)
