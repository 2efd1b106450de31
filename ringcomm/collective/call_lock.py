"""The lock of a runner: one call at a time, and the parts of one call next to each other."""

from __future__ import annotations

from typing import Any, Callable, Type


class Parts:
    """A ``with`` block of several parts (calls of the runner), which must not be left between them.

    Args:
        lock: a ``threading.RLock``; keeps other threads out.
        started: how many calls the runner has started.
        count: how many parts there are; ``math.inf``: an unknown number.
        left: called with the exception if one ends the block after the first part has started, and before the
            last has.
        but: exceptions that all ranks raise alike, or that are reported already; they do not count.
    """

    __slots__ = ("_but", "_count", "_first", "_left", "_lock", "_started")

    def __init__(
        self,
        lock: Any,
        started: Callable[[], int],
        count: float,
        left: Callable[[BaseException], None],
        but: Type[BaseException],
    ) -> None:
        self._lock = lock
        self._started = started
        self._count = count
        self._left = left
        self._but = but
        self._first = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._first = self._started()

    def __exit__(self, kind: Any, problem: Any, traceback: Any) -> None:
        try:
            counts = problem is not None and not isinstance(problem, self._but)
            if counts and 0 < self._started() - self._first < self._count:
                self._left(problem)
        finally:
            self._lock.release()
