"""Where the threads of this process are just now, as :mod:`faulthandler` writes it.

``sys._current_frames()`` is not used: a Python frame of another thread can end while this one goes from frame
to frame, and CPython 3.11 has crashed and hung on that (https://github.com/python/cpython/issues/99110 and
106883). faulthandler writes everything in one piece, in C, while no other thread runs Python.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
import traceback
from typing import Any, Dict, List, NamedTuple, Set, Tuple

_MAX_FRAMES = 30
_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPE = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")

Frame = Tuple[str, int, str]
"""(file, line, function)"""


class Dump(NamedTuple):
    """What faulthandler has written: frames by thread identifier, innermost call last.

    A thread that is not in Python has none. Not ``whole``: faulthandler writes no more than a hundred
    threads.
    """

    frames: Dict[int, List[Frame]]
    whole: bool


def parse(text: str) -> Dump:
    """Return what :mod:`faulthandler` has written, threads in its order."""
    frames: Dict[int, List[Frame]] = {}
    current: List[Frame] = []
    whole = True
    for line in text.splitlines():
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if thread:
            current = frames.setdefault(int(thread[1], 16), [])
        elif frame:
            current.insert(0, (_unescaped(frame[1]), int(frame[2]), _unescaped(frame[3])))
        elif line == "...":
            whole = False
    return Dump(frames, whole)


def _unescaped(name: str) -> str:
    """faulthandler writes ASCII only."""
    return _ESCAPE.sub(lambda found: chr(int(found[0][2:], 16)), name)


def dump() -> Dump:
    """Return the stacks of all threads; OSError if there is no room for some kilobytes."""
    descriptor = _temporary()
    try:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            found = parse(file.read().decode("ascii", "replace"))
    finally:
        os.close(descriptor)
    del found.frames.get(threading.get_ident(), [])[-1:]  # this function
    return found


def _temporary() -> int:
    """A descriptor of a file without a name."""
    if hasattr(os, "memfd_create"):
        try:
            descriptor: int = os.memfd_create("ringcomm-stacks", os.MFD_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
            return descriptor
        except OSError:
            pass  # A sandbox may have the call but forbid it.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def threads_in_python(within: str = "") -> Tuple[Set[int], bool]:
    """Return the threads that have called Python code (of one file), and whether these are all."""
    found = dump()
    return {
        ident for ident, frames in found.frames.items()
        if frames and (not within or any(frame[0] == within for frame in frames))
    }, found.whole  # fmt: skip


def main_stack() -> str:
    """The stack of the main thread, innermost call last, as Python prints it."""
    frames = dump().frames.get(threading.main_thread().ident or 0, [])
    return "".join(
        traceback.format_list([traceback.FrameSummary(*frame) for frame in frames[-_MAX_FRAMES:]])
    )


def thread_stacks() -> List[Dict[str, Any]]:
    """All threads, the main one first: ``name``, ``main``, and ``frames``, innermost last.

    A frame is ``[file, line, function]``. Of deep stacks only the inner frames are there.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = [
        {"name": str(names.get(ident, ident)), "main": ident == main,
         "frames": [list(frame) for frame in frames[-_MAX_FRAMES:]]}
        for ident, frames in dump().frames.items()
    ]  # fmt: skip
    return sorted(found, key=lambda thread: not thread["main"])
