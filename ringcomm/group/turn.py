"""Which thread moves the messages of a group: a caller that waits for one, or else a thread of the group.

A message that is received by another thread than the one that waits for it costs two wake-ups, of that thread
and of the caller. So a caller that waits takes the turn and moves messages itself, all of them, until its own
has come. The group's thread has the turn at all other times, also while it sleeps: then it is woken once, and
pauses for a while after callers have had the turn, so that a caller finds the turn free the next time.
"""

from __future__ import annotations

import threading
from typing import Callable

from ..clock import monotonic

PAUSE_S = 2e-3
"""So long after a caller has given the turn back the thread takes it, if no message needs it before."""


class Turn:
    """The right to move messages, of one thread at a time.

    Args:
        wake: wakes the thread that has the turn, if it sleeps.

    Attributes:
        wanted: whether a caller has the turn, or waits until the thread gives it back.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wanted = False
        self._wake = wake
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._resume = threading.Event()
        self._given_s = monotonic()
        self._owner = 0
        self._ended = False

    # ---- called by callers -------------------------------------------------------------------

    def take(self, at_once: bool = False) -> bool:
        """Take the turn for a caller; returns whether it has it now.

        Args:
            at_once: without waiting for the group's thread.

        Returns:
            False if another caller has the turn, or (``at_once``) the group's thread.
        """
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
        """Give the turn back.

        Args:
            needed: whether the thread takes it without a pause.
        """
        self._given_s = monotonic()
        self._owner, self.wanted = 0, False
        self._lock.release()
        if needed:
            self.hurry()

    def hurry(self) -> None:
        """Messages have to be moved now: by the thread, or by the caller that has the turn."""
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
        while self.wanted or monotonic() - self._given_s < PAUSE_S:
            if self._resume.wait(PAUSE_S):
                self._resume.clear()
                if not self.wanted:
                    return

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = 0
        self._lock.release()
