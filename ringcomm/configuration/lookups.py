"""Which environment variables the user's program looks up: ``ringrun`` compares their values between hosts.

A variable that only the launching shell has (``LR=0.1 ringrun ...``) makes ranks compute different things
without an error. Only names are recorded here; the agent of each host has the values of its ranks.
Look-ups of libraries for themselves do not count.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Callable, Iterator, List, Optional, Set

from . import environment
from .environment import PREFIX

_OURS = ("ringcomm", "ringrun")
_FOR_THE_PROGRAM = (
    "os", "collections", "posixpath", "click", "typer", "configargparse", "environs", "marshmallow",
    "decouple", "omegaconf", "hydra", "jsonargparse",
)  # fmt: skip
"""Modules and packages that look up what their caller has named."""
_INSTALLED = ("site-packages", "dist-packages", "horovod_shim")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{1,63}")
_READERS = {"environ", "getenv"}
_MAX_NAMES = 500


class Lookups:
    """The names that the program has looked up.

    Attributes:
        on_new: called when there is something to :meth:`take`.
    """

    def __init__(self) -> None:
        self.on_new: Callable[[], None] = lambda: None
        self._known: Set[str] = set()
        self._new: List[str] = []

    def begin(self) -> None:
        """Record look-ups from now on, in a job of several hosts that ringrun has started.

        The program may have looked up something before it imported ringcomm: so the names in the code that
        imports it count, too.
        """
        if _is_compared():
            frame: Optional[FrameType] = sys._getframe(1)
            while frame is not None:
                if _is_users(frame):
                    for name in _names_in(frame.f_code):
                        self._add(name)
                frame = frame.f_back
            environment.observe(self._observed)

    def take(self) -> List[str]:
        """The names since the last time."""
        found, self._new = self._new, []
        return found

    def _observed(self, name: str) -> None:
        if not isinstance(name, str) or name in self._known:
            return
        frame: Optional[FrameType] = sys._getframe(2)
        while frame is not None and _package(frame) in _FOR_THE_PROGRAM:
            frame = frame.f_back
        if frame is not None and _is_users(frame):
            self._add(name)
            self.on_new()

    def _add(self, name: str) -> None:
        if len(self._known) < _MAX_NAMES and name not in self._known and _NAME.fullmatch(name):
            self._known.add(name)
            self._new.append(name)


LOOKUPS = Lookups()
"""Those of this process."""


def _is_compared() -> bool:
    """Return whether ringrun has started this process, and others on other hosts."""
    environ = environment.variables(None)
    if not environ.get(PREFIX + "FLIGHT_FD"):
        return False
    here, everywhere = environ.get("LOCAL_WORLD_SIZE"), environ.get("WORLD_SIZE")
    return here != everywhere or environ.get(PREFIX + "ELASTIC", "") not in ("", "0")


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_users(frame: FrameType) -> bool:
    """Return whether the code of a frame is the user's."""
    file = frame.f_code.co_filename
    if file.startswith("<"):  # of `python -c`, or made by a library
        return _package(frame) == "__main__"
    return _package(frame) not in _OURS and _is_users_file(file)


@lru_cache(maxsize=None)
def _is_users_file(file: str) -> bool:
    return not is_installed(Path(file).resolve())


def _names_in(code: CodeType) -> Iterator[str]:
    """The constants that may name variables, in a module's code if any of it uses the environment."""
    codes = [code]
    for each in codes:
        codes += [item for item in each.co_consts if isinstance(item, CodeType)]
    if any(_READERS.intersection(each.co_names) for each in codes):
        functions = {each.co_name for each in codes}  # constants, too, before Python 3.11
        for each in codes:
            yield from (item for item in each.co_consts if isinstance(item, str) and item not in functions)


@lru_cache(maxsize=None)
def _libraries() -> List[Path]:
    return [Path(place).resolve() for place in sysconfig.get_paths().values()]


def is_installed(path: Path) -> bool:
    """Return whether a file, given by its resolved path, belongs to Python or to an installed package."""
    return any(part in _INSTALLED for part in path.parts) or any(
        place in path.parents for place in _libraries()
    )
