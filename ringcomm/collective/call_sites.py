"""The places of calls in the user's program."""

from __future__ import annotations

import dis
import logging
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Dict, List, Optional, Set, Tuple

import numpy as np

from ..ops import ReduceOp

logger = logging.getLogger("ringcomm")

Site = Tuple[CodeType, int]
"""A place as it is found, code and instruction: its text is made only when it is read.

It holds no frame, which would keep the caller's variables alive.
"""

_packages = [f"{Path(__file__).resolve().parent.parent}{os.sep}"]
_ours: Dict[str, bool] = {}
_THREADING = threading.__file__
_truncating: Set[str] = set()
_MAX_TRUNCATING = 4096


def look_through(package: ModuleType) -> None:
    """Exclude a package, or a module that is a single file, from the user's program that it calls for."""
    path = Path(package.__file__ or "").resolve()
    place = f"{path.parent}{os.sep}" if path.name == "__init__.py" else str(path)
    if package.__file__ and place not in _packages:
        _packages.append(place)
        _ours.clear()


def is_ours(filename: str) -> bool:
    """Return whether a file belongs to ringcomm, or to a package that calls it for the user."""
    known = _ours.get(filename)
    if known is None:
        known = _ours[filename] = str(Path(filename).resolve()).startswith(tuple(_packages))
    return known


def _outside(depth: int) -> FrameType:
    frame = sys._getframe(depth)
    ours = _ours
    while True:
        filename = frame.f_code.co_filename
        known = ours.get(filename)
        if not (is_ours(filename) if known is None else known):
            return frame
        caller = frame.f_back
        if caller is None or caller.f_code.co_filename == _THREADING:
            return frame
        frame = caller


def _caller(frame: FrameType) -> Optional[FrameType]:
    """Return the caller, or None of a thread's function: `threading` is not a place in a program."""
    caller = frame.f_back
    return None if caller is None or caller.f_code.co_filename == _THREADING else caller


def find_site(depth: int, known: List[Any]) -> Site:
    """Return the innermost place outside ringcomm that led here. ``depth``: this many callers, that of this
    function being 1, are known to be inside. ``known``: :func:`nowhere` the first time, then depth and code
    of the last result, which is tried first: walking costs more than the rest.
    """
    try:
        frame = sys._getframe(known[0])
        code = frame.f_code
        if code is known[1]:
            return code, frame.f_lasti
    except ValueError:
        pass  # the stack is not that deep this time
    frame = _outside(depth + 1)
    known[:] = _depth_of(frame), frame.f_code
    return frame.f_code, frame.f_lasti


def nowhere() -> List[Any]:
    """Return the initial ``known`` of a place: depth and code."""
    return [0, None]


def this_site() -> Site:
    """Return :func:`find_site`'s result where nothing is known."""
    frame = _outside(2)
    return frame.f_code, frame.f_lasti


def _depth_of(wanted: FrameType) -> int:
    """Return the depth of a frame, as the caller of this function would pass it to ``sys._getframe``."""
    depth = 0
    while sys._getframe(depth + 1) is not wanted:
        depth += 1
    return depth


def site_text(site: Site) -> str:
    """Return ``file:line``."""
    return f"{site[0].co_filename}:{_line(site)}"


def _line(site: Site) -> int:
    code, instruction = site
    found = code.co_firstlineno
    for offset, line in dis.findlinestarts(code):
        if offset > instruction:
            break
        found = line or found
    return found


def call_site() -> str:
    """Return file and line of the caller's code that led here, at once."""
    frame = _outside(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def note_truncation(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Warn once per line of the program if it averages integers: the result is an integer as well."""
    if op != ReduceOp.AVERAGE or dtype.kind not in "iu":
        return
    site = call_site()
    if site not in _truncating and len(_truncating) < _MAX_TRUNCATING:
        _truncating.add(site)
        logger.warning(
            "%s: the average of integers (%s) is truncated to an integer; of 0 and 1 it is 0. Convert them "
            "to floating-point numbers first, or use op=Sum.",
            site, dtype.name,
        )  # fmt: skip
