"""Which thread does a group's work: a caller that waits for it, or the group's own thread.

A message that is received by another thread than the one that waits for it costs two wake-ups, of that thread
and of the caller. So a caller that waits takes the :class:`Turn` and moves all messages itself, until its own
has arrived. The group's thread has the turn at all other times, even while it sleeps: then it is woken once,
and pauses for a while after callers have had the turn, so that a caller finds the turn free the next time. An
:class:`OperationQueue` runs collectives one after another, in the order of the calls.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Callable, Deque, Optional

from ..clock import Deadline, monotonic
from ..errors import NotInitializedError, RingcommError

# A collective or a point-to-point message, such as :class:`.RingcommWork`: ``what`` is its name for errors,
# ``waiters`` counts the threads that wait for it, ``source`` is the sender of a received message, ``site``
# the place of its call, and ``noted`` the history that records it, and its record there.
Work = Any


class OperationQueue:
    """A queue of works and the thread that runs them. All ranks call collectives in the same order, and the
    queue keeps that order. To avoid wake-ups, a synchronous caller runs its own work if nothing is queued,
    and a thread that waits for a queued work runs the works before it, unless another thread is running one.
    A work that is submitted by the thread that is running a work (from a callback of that work's future) runs
    at once, before anything queued: so its position in the order is the same on all ranks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._queue: Deque[Work] = deque()
        self._runner: Optional[int] = None
        self._thread: Optional[threading.Thread] = None
        self._closed: Optional[str] = None

    def submit(self, work: Work, inline: bool) -> Work:
        """Run a work now if ``inline`` and the queue is empty; otherwise append it."""
        me = threading.get_ident()
        with self._lock:
            if self._closed is not None:
                raise NotInitializedError(self._closed)
            nested = self._runner == me
            if not nested:
                if not inline or self._runner is not None or self._queue:
                    self._queue.append(work)
                    if self._thread is None:
                        thread = threading.Thread(target=self._main, name=self._name, daemon=True)
                        thread.start()
                        self._thread = thread
                    elif self._runner is None:
                        self._ready.notify()
                    return work
                self._runner = me
        if nested:
            work.perform()
        else:
            work.waiters += 1  # its caller waits for it in this call
            self._perform(work)
        return work

    def _perform(self, work: Work) -> None:
        try:
            work.perform()
        finally:
            with self._lock:
                self._runner = None
                if self._queue:
                    self._ready.notify()
                else:
                    self._idle.notify_all()

    def help(self, work: Work) -> None:
        """Run the queue up to and including this work, unless another thread is running a work."""
        me = threading.get_ident()
        while not work.is_completed():
            with self._lock:
                nested = self._runner == me
                if not self._queue or not nested and self._runner is not None:
                    return
                self._runner = me
                item = self._queue.popleft()
            if nested:
                item.perform()
            else:
                self._perform(item)

    def _main(self) -> None:
        while True:
            with self._lock:
                while self._runner is not None or not self._queue:
                    if self._closed is not None and not self._queue:
                        return
                    self._ready.wait()
                self._runner = threading.get_ident()
                work = self._queue.popleft()
            self._perform(work)
            del work

    def drain(self, deadline: Deadline) -> None:
        """Wait until no work runs and none is queued, or the deadline has expired."""
        with self._lock:
            while (self._queue or self._runner is not None) and not deadline.expired():
                if self._runner == threading.get_ident():
                    return
                self._idle.wait(min(deadline.remaining_s(), 3600.0))

    def close(self, why: str, error: RingcommError) -> None:
        """Accept no more works; queued works fail with ``error``."""
        with self._lock:
            self._closed = self._closed or why
            left = list(self._queue)
            self._queue.clear()
            self._ready.notify_all()
            self._idle.notify_all()
        for work in left:
            work.finish(error)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(10.0)


class Turn:
    """The right to move messages, of one thread at a time; after a caller the thread waits ``pause_s``."""

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
