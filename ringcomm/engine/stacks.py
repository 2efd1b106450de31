"""Where the threads of this process are just now, as :mod:`faulthandler` writes it, and which of them wait.

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
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple
from weakref import WeakKeyDictionary

from ..collective import runner
from ..collective.observe import Progress
from ..wire.messages import Message
from .request import Handle

_MAX_FRAMES = 30
_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPE = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")

Frame = Tuple[str, int, str]  # (file, line, function)


class Dump(NamedTuple):
    """What faulthandler has written: frames by thread identifier; not ``whole`` beyond a hundred threads."""

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
            return os.memfd_create("ringcomm-stacks", os.MFD_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
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
    """Return all threads, the main one first, with the inner frames of each, ``[file, line, function]``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = [
        {"name": str(names.get(ident, ident)), "main": ident == main,
         "frames": [list(frame) for frame in frames[-_MAX_FRAMES:]]}
        for ident, frames in dump().frames.items()
    ]  # fmt: skip
    return sorted(found, key=lambda thread: not thread["main"])


# ---- which threads of a rank submit operations, and which wait ---------------------------------------------

_OWN_THREADS = "ringcomm-"
"""How the names of ringcomm's own threads begin. They submit nothing of the program's."""

_owners: WeakKeyDictionary[threading.Thread, object] = WeakKeyDictionary()


def set_owner(thread: threading.Thread, owner: object) -> None:
    """Say that a thread submits operations of one rank only, where several ranks are in one process."""
    _owners[thread] = owner


Wait = Tuple[int, Handle, bool, bool]
"""A thread that waits: identifier, handle, limited, reports. If the time is limited it may then submit
something else. It does not count as waiting unless it reports: other threads may go on instead of it."""


class BlockedReport(NamedTuple):
    """The report to rank 0 of a rank whose threads all wait. It had executed so many responses by then; -1:
    nothing was reported. ``for_good``: no thread is left that could submit anything. ``calls`` is the number
    of direct calls entered, and ``call`` the last one and what it needs (:attr:`.Progress.root`), if a thread
    waits in it.
    """

    executed: int
    for_good: bool
    calls: int = 0
    call: Tuple[Any, ...] = ()

    def message(self) -> Message:
        """As rank 0 gets it."""
        return {
            "type": "blocked", "heard": self.executed, "for_good": self.for_good, "calls": self.calls,
            "call": list(self.call),
        }  # fmt: skip


NOTHING_REPORTED = BlockedReport(-1, False)


class Waiters:
    """The threads of a rank that wait, and that have submitted; used under the engine's lock."""

    def __init__(self) -> None:
        self.submitters: Set[int] = set()
        self.waits: List[Wait] = []
        self._owner: Optional[object] = _owners.get(threading.current_thread())

    def all_wait(self) -> bool:
        """Return whether every live thread that ever submitted anything waits for what is not done."""
        alive, whole = threads_in_python()
        if whole:
            self.submitters &= alive
        return self.submitters <= self._waiting(limited=True)

    def report(self, executed: int, calls: Progress) -> BlockedReport:
        """Return the report to rank 0, if all threads that have submitted anything wait, perhaps for good."""
        in_call = bool(calls.doing) and calls.sequence % 2 == 0 and calls.root >= -1
        waiting = self._waiting(limited=False)
        if in_call:
            waiting |= threads_in_python(runner.__file__)[0]
        foreign = {thread.ident for thread in threading.enumerate() if self._is_foreign(thread)}
        alive, whole = threads_in_python()
        for_good = whole and alive <= waiting | foreign
        call = (calls.doing, calls.root) if in_call and for_good else ()
        return BlockedReport(executed, for_good, calls.number, call)

    def _waiting(self, limited: bool) -> Set[int]:
        """Threads that wait for what is not done; ``limited``: also those that wait for a limited time."""
        threads: Dict[bool, Set[int]] = {True: set(), False: set()}
        for ident, handle, is_limited, reports in self.waits:
            threads[not handle.finished and reports and (limited or not is_limited)].add(ident)
        return threads[True] - threads[False]

    def _is_foreign(self, thread: threading.Thread) -> bool:
        """Return whether a thread submits nothing of this rank's."""
        if thread.name.startswith(_OWN_THREADS):
            return True
        owner = _owners.get(thread)
        return owner is not None and owner is not self._owner
