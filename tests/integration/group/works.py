"""Works for the queue and the point-to-point engine of a group, without a framework."""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

LIMIT_S = 60.0


class Task:
    """A work that calls a function, or a message that an engine finishes."""

    def __init__(self, what: str, function: Callable[[], Any] = lambda: None) -> None:
        self.what = what
        self.waiters = 0
        self.source = -1
        self.site = self.noted = None
        self.thread: Optional[int] = None  # in which it has run
        self.error: Optional[BaseException] = None  # with which it has failed
        self._function = function
        self._ended = threading.Event()

    def perform(self) -> None:
        self.thread = threading.get_ident()
        try:
            self._function()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.finish(error)
        except BaseException as error:
            self.finish(error)
            raise
        else:
            self.finish()

    def finish(self, error: Optional[BaseException] = None) -> None:
        if not self._ended.is_set():
            self.error = error
            self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def where(self) -> str:
        return " at train.py:7"

    def ended(self) -> Optional[BaseException]:
        """Wait for the end; the error, if it has failed."""
        assert self._ended.wait(LIMIT_S), f"{self.what} has not ended"
        return self.error
