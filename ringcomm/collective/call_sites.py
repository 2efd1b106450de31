"""Where in the user's program a call was made."""

from __future__ import annotations

import dis
import os
import sys
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Dict, List, Tuple

Site = Tuple[CodeType, int]
"""A place as it is found, code and instruction: making text of it can wait until somebody reads it.

It holds no frame, which would keep the caller's variables alive.
"""

_packages = [f"{Path(__file__).resolve().parent.parent}{os.sep}"]
_ours: Dict[str, bool] = {}


def look_through(package: ModuleType) -> None:
    """From now on calls from this package are not places in the user's program: it calls for the user.

    Args:
        package: a package, with all that is in it, or a module that is a single file.
    """
    path = Path(package.__file__ or "").resolve()
    place = f"{path.parent}{os.sep}" if path.name == "__init__.py" else str(path)
    if package.__file__ and place not in _packages:
        _packages.append(place)
        _ours.clear()


def is_ours(filename: str) -> bool:
    """Whether a file belongs to ringcomm, or to a package that calls it for the user."""
    known = _ours.get(filename)
    if known is None:
        known = _ours[filename] = str(Path(filename).resolve()).startswith(tuple(_packages))
    return known


def _outside(depth: int) -> FrameType:
    frame = sys._getframe(depth)
    ours = _ours
    while ours.get(frame.f_code.co_filename) or is_ours(frame.f_code.co_filename):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


def find_site(depth: int, known: List[Any]) -> Site:
    """The innermost place outside ringcomm that led here.

    Args:
        depth: so many callers, that of this function being 1, are known to be inside.
        known: ``[0, None]`` the first time, then what this function has made of it: how deep the place
            was last time and in which code. It is tried first, because walking costs more than the rest.
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


def this_site() -> Site:
    """The same as :func:`find_site` where nothing is known."""
    frame = _outside(2)
    return frame.f_code, frame.f_lasti


def _depth_of(wanted: FrameType) -> int:
    """How deep a frame is, as the caller of this function would have to say it to ``sys._getframe``."""
    depth = 0
    while sys._getframe(depth + 1) is not wanted:
        depth += 1
    return depth


def site_text(site: Site) -> str:
    """``file:line``."""
    code, instruction = site
    found = code.co_firstlineno
    for offset, line in dis.findlinestarts(code):
        if offset > instruction:
            break
        found = line or found
    return f"{code.co_filename}:{found}"


def call_site() -> str:
    """File and line of the caller's code that led here, at once."""
    frame = _outside(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
