"""Where the program of this rank is just now."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType
from typing import List, Optional

_MOST_FRAMES = 30


def main_stack() -> str:
    """The stack of the main thread, innermost call last, as Python prints it."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    return _text(frame)


def all_stacks() -> str:
    """The stacks of all threads, each under its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: List[str] = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"Thread {names.get(ident, ident)}:\n{_text(frame)}")
    return "\n".join(parts)


def _text(frame: Optional[FrameType]) -> str:
    return "".join(traceback.format_stack(frame)[-_MOST_FRAMES:]) if frame is not None else ""
