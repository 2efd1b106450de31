"""Decides which thread moves a group's messages: a caller that waits for one, or the group's own thread.

A message that is received by another thread than the one that waits for it costs two wake-ups, of that thread
and of the caller. So a caller that waits takes the turn and moves all messages itself, until its own has
arrived. The group's thread has the turn at all other times, even while it sleeps: then it is woken once, and
pauses for a while after callers have had the turn, so that a caller finds the turn free the next time.
"""

from __future__ import annotations

import threading
from typing import Callable

from ..clock import monotonic


class Turn:
    """The right to move messages, of one thread at a time. ``wake`` wakes the thread that has it.

    The thread leaves it to callers for ``pause_s`` after one of them has given it back.
    """

    def __init__(self, wake: Callable[[], None], pause_s: float) -> None:
        self.wanted = False  # a caller has the turn, or waits for the thread to give it back
        self._wake = wake
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._resume = threading.Event()
        self._until_s = monotonic() + pause_s
        self._owner = 0
        self._ended = False

    # ---- called by callers -------------------------------------------------------------------

    def take(self, at_once: bool = False) -> bool:
        """Take the turn for a caller; False if another caller has it, or, with ``at_once``, the thread."""
        with self._asking:
            if self.wanted or self._ended:
                return False
            self.wanted = True
        if not self._lock.acquire(blocking=False):
            if at_once:
                self.wanted = False
                return False
            self._wake()
            self._lock.acquire()
        self._owner = threading.get_ident()
        return True

    def give_back(self, needed: bool) -> None:
        """Give the turn back; if ``needed`` the thread takes it without a pause."""
        self.expect()
        self._owner, self.wanted = 0, False
        self._lock.release()
        if needed:
            self.hurry()

    def expect(self) -> None:
        """A caller will probably take the turn: the thread pauses, as after a caller has had it."""
        self._until_s = monotonic() + self._pause_s

    def hurry(self) -> None:
        """Let the thread, or the caller that has the turn, move messages now."""
        self._until_s = 0.0
        self._resume.set()
        self._wake()

    def is_mine(self) -> bool:
        """Return whether the calling thread has the turn."""
        return self._owner == threading.get_ident()

    def end(self, timeout_s: float) -> None:
        """Wait until no thread has the turn, and keep it from all."""
        with self._asking:
            ended, self._ended = self._ended, True
        if not ended:
            self._lock.acquire(timeout=timeout_s)

    # ---- called by the thread ----------------------------------------------------------------

    def pause(self) -> None:
        """Wait while callers have the turn, or had it a moment ago."""
        while self.wanted or monotonic() < self._until_s:
            if self._resume.wait(self._pause_s):
                self._resume.clear()
                if not self.wanted:
                    return

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = 0
        self._lock.release()
