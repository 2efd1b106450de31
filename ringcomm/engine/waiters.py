"""Which threads of this rank submit operations, and which of them wait."""

from __future__ import annotations

import threading
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple
from weakref import WeakKeyDictionary

from ..collective import runner
from ..collective.observe import Progress
from ..wire.messages import Message
from .request import Handle
from .stacks import threads_in_python

_OWN_THREADS = "ringcomm-"
"""How the names of ringcomm's own threads begin. They submit nothing of the program's."""

_owners: WeakKeyDictionary[threading.Thread, object] = WeakKeyDictionary()


def set_owner(thread: threading.Thread, owner: object) -> None:
    """Say that a thread submits operations of one rank only, where several ranks are in one process.

    Threads without an owner may submit operations of any rank.
    """
    _owners[thread] = owner


class Wait(NamedTuple):
    """A thread waits for a handle.

    If the time is ``limited`` it may then submit something else. It does not count as waiting unless it
    ``reports``: a framework's other threads may go on instead of it.
    """

    handle: Handle
    limited: bool
    reports: bool = True


class BlockedReport(NamedTuple):
    """The report to rank 0 of a rank whose threads all wait.

    It had executed so many responses by then; -1: nothing was reported. ``for_good``: no thread is left that
    could submit anything. ``calls`` is the number of direct calls entered, and ``call`` the last one and what
    it needs (:attr:`.Progress.root`), if a thread waits in it.
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
    """Used under the engine's lock. Made in a thread of its rank.

    ``submitters`` are the threads that have submitted operations, ``waits`` those of each thread that waits.
    """

    def __init__(self) -> None:
        self.submitters: Set[int] = set()
        self.waits: Dict[int, List[Wait]] = {}
        self._owner: Optional[object] = _owners.get(threading.current_thread())

    def enter(self, wait: Wait) -> None:
        """The calling thread begins to wait."""
        self.waits.setdefault(threading.get_ident(), []).append(wait)

    def leave(self, wait: Wait) -> None:
        """The calling thread has waited, or was interrupted before it had begun to."""
        ident = threading.get_ident()
        left = [other for other in self.waits.pop(ident, ()) if other is not wait]
        if left:
            self.waits[ident] = left

    def all_wait(self) -> bool:
        """Return whether every live thread that ever submitted anything waits for what is not done."""
        alive, whole = threads_in_python()
        if whole:
            self.submitters &= alive
        return self.submitters <= self._waiting(limited=True)

    def report(self, executed: int, calls: Progress) -> BlockedReport:
        """Return the report to rank 0, if all threads that have submitted anything wait."""
        in_call = bool(calls.doing) and calls.sequence % 2 == 0 and calls.root >= -1
        for_good = self.none_can_submit(in_call)
        call = (calls.doing, calls.root) if in_call and for_good else ()
        return BlockedReport(executed, for_good, calls.number, call)

    def none_can_submit(self, in_call: bool = False) -> bool:
        """Return whether every thread that may submit anything waits, without a limit.

        That includes the main thread, threads that have not submitted anything yet, threads of a framework
        that are in Python now, and with ``in_call`` threads in a direct call.
        """
        waiting = self._waiting(limited=False)
        threads = {thread.ident: thread for thread in threading.enumerate()}
        if in_call:
            waiting |= threads_in_python(runner.__file__)[0]
        alive, whole = threads_in_python()
        return whole and all(
            ident in waiting or (ident in threads and self._is_foreign(threads[ident])) for ident in alive
        )

    def _waiting(self, limited: bool) -> Set[int]:
        """Threads that wait for what is not done; ``limited``: also those that wait for a limited time."""
        return {
            ident
            for ident, waits in self.waits.items()
            if all(
                not wait.handle.done() and wait.reports and (limited or not wait.limited) for wait in waits
            )
        }

    def _is_foreign(self, thread: threading.Thread) -> bool:
        """Return whether a thread submits nothing of this rank's."""
        if thread.name.startswith(_OWN_THREADS):
            return True
        owner = _owners.get(thread)
        return owner is not None and owner is not self._owner
