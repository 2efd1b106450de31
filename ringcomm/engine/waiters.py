"""Which threads of this rank submit operations, and which of them wait."""

from __future__ import annotations

import threading
from typing import Dict, Set


class Waiters:
    """Used under the engine's lock."""

    def __init__(self) -> None:
        self._submitters: Set[int] = set()
        self._waiting: Dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def submitted(self) -> None:
        """The calling thread has submitted something."""
        self._submitters.add(threading.get_ident())

    def enter(self) -> None:
        """The calling thread begins to wait."""
        ident = threading.get_ident()
        self._waiting[ident] = self._waiting.get(ident, 0) + 1

    def leave(self) -> None:
        """The calling thread has waited."""
        ident = threading.get_ident()
        self._waiting[ident] -= 1
        if not self._waiting[ident]:
            del self._waiting[ident]

    def all_wait(self) -> bool:
        """Whether every thread that ever submitted anything, and still lives, waits."""
        self._submitters &= {thread.ident or 0 for thread in threading.enumerate()}
        return self._submitters <= set(self._waiting)
