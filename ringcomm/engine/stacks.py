"""Where the program of this rank is just now."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType
from typing import Any, Dict, List, Optional

_MOST_FRAMES = 30


def main_stack() -> str:
    """The stack of the main thread, innermost call last, as Python prints it."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    return "".join(traceback.format_stack(frame)[-_MOST_FRAMES:]) if frame is not None else ""


def thread_stacks() -> List[Dict[str, Any]]:
    """All threads, the main one first: ``name``, ``main``, and ``frames``, innermost last.

    A frame is ``[file, line, function]``. Of deep stacks only the inner frames are there.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = [
        {"name": str(names.get(ident, ident)), "main": ident == main, "frames": _frames(frame)}
        for ident, frame in sys._current_frames().items()
    ]
    return sorted(found, key=lambda thread: not thread["main"])


def _frames(frame: Optional[FrameType]) -> List[List[Any]]:
    found: List[List[Any]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append([frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name])
        frame = frame.f_back
    return found[::-1]
