"""The variables of this process: those of the environment, or those that it was assigned in their place."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Callable, Dict, Iterator, Mapping, Optional, Tuple

from .variables import MEMBERSHIP_VARIABLES

if TYPE_CHECKING:
    _Environ = os._Environ[str]
else:
    _Environ = type(os.environ)

PREFIX = "RINGCOMM_"

_assigned: Dict[str, str] = {}
_observer: Callable[[str], None] = lambda name: None  # noqa: E731
_iterations = 0
_iterated_at: Optional[Tuple[CodeType, int]] = None


def variables(environ: Optional[Mapping[str, str]]) -> Mapping[str, str]:
    """The given environment, or else this process's with the variables that it was assigned."""
    if environ is not None:
        return environ
    if not _assigned:
        return os.environ
    replaced = {PREFIX + name for name, _ in MEMBERSHIP_VARIABLES}
    return {**{name: value for name, value in os.environ.items() if name not in replaced}, **_assigned}


def assign(variables: Mapping[str, str]) -> None:
    """Give this process its part in a job without a launcher, as Ray, Dask and Spark do.

    From now on these variables take the place of those in the environment, in which they are not written:
    programs that this process starts do not inherit them, and in particular not the key.

    Args:
        variables: ``RINGCOMM_*`` variables; none to read the environment again.
    """
    global _assigned
    _assigned = dict(variables)


def export(variables: Mapping[str, Optional[str]]) -> None:
    """Set variables of this process, for the user's function and what it starts; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def exported(variables: Mapping[str, Optional[str]]) -> Iterator[None]:
    """The same for the time of a ``with`` block."""
    before = {name: os.environ.get(name) for name in variables}
    export(variables)
    try:
        yield
    finally:
        export(before)


class _Observed(_Environ):
    """``os.environ`` whose look-ups are observed: ``[]``, ``get``, ``in`` and ``os.getenv`` all come here.

    A loop over all variables says nothing about one of them, and neither does a copy (``dict(os.environ)``):
    that lists the names first, and then looks them up in the same instruction.
    """

    def __getitem__(self, key: str) -> str:
        if not _iterations and _place(sys._getframe(1)) != _iterated_at:
            _observer(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        global _iterations, _iterated_at
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") == "collections.abc":
            frame = frame.f_back
        _iterated_at = _place(frame)
        _iterations += 1
        try:
            yield from super().__iter__()
        finally:
            _iterations -= 1


def _place(frame: FrameType) -> Tuple[CodeType, int]:
    return frame.f_code, frame.f_lasti


def observe(observer: Callable[[str], None]) -> None:
    """From now on call a function with the name of each variable that is looked up in ``os.environ``."""
    global _observer
    if type(os.environ) in (_Environ, _Observed):
        os.environ.__class__ = _Observed  # the object stays: others have imported it
        _observer = observer
