"""The flight recorder's part in a runner: its last operations, in a ring that is allocated once.

It is always on, so the way of a small message through it is short: a list of references, two looks at
the clock, and where the call came from. What that means is worked out when somebody asks.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from ..clock import monotonic
from .sites import find_site, site_text

Row = Dict[str, Any]
"""An operation as it is written down, ready for JSON.

``op`` (its number), ``kind``, ``name``, ``what`` (the call as a person would write it), ``site``
(``file:line``), ``state``, ``began`` and ``ended`` (monotonic seconds, None: not yet), ``moved`` (bytes,
where it is running or has failed), ``error`` (where it has failed).
"""

SUBMITTED, RUNNING, DONE, FAILED = "submitted", "running", "done", "failed"
"""What may have become of an operation; ``submitted``: it waits for other ranks to submit it, too."""


class CallJournal:
    """What one runner has run.

    Args:
        capacity: how many operations are kept.

    Attributes:
        on_failure: told of the error when an operation fails, if set.
    """

    def __init__(self, capacity: int) -> None:
        self._ring: List[Optional[List[Any]]] = [None] * capacity
        self._capacity = capacity
        self._count = 0
        self._open: List[Any] = []
        self._execution: Any = None
        self.on_failure: Optional[Callable[[BaseException], None]] = None

    def begin(self, sequence: int, call: Any, execution: Any, known_site: List[Any]) -> None:
        """A call starts to run. Called by ``Runner._run`` only.

        Args:
            known_site: where the same call was made last time; see :func:`~.sites.find_site`.
        """
        # Inside are: this method, _run, a method of the runner.
        entry = self._open = [sequence, call, find_site(4, known_site), monotonic(), None, None]
        self._execution = execution
        self._ring[self._count % self._capacity] = entry
        self._count += 1

    def end(self) -> None:
        """The call has come to a good end."""
        self._open[4] = monotonic()

    def fail(self, error: BaseException) -> None:
        """The call has failed."""
        self._open[4:] = monotonic(), f"{type(error).__name__}: {error}"
        if self.on_failure is not None:
            self.on_failure(error)

    def rows(self) -> List[Row]:
        """All that is kept, oldest first. For any thread."""
        start = self._count % self._capacity
        entries = [*self._ring[start:], *self._ring[:start]]
        return [self._row(entry) for entry in entries if entry is not None]

    def _row(self, entry: List[Any]) -> Row:
        sequence, call, site, began_s, ended_s, error = entry
        state = RUNNING if ended_s is None else DONE if error is None else FAILED
        row = {
            "op": sequence, "kind": call.kind, "name": call.name, "what": call.describe(),
            "site": site_text(site), "state": state, "began": began_s, "ended": ended_s,
        }  # fmt: skip
        if state != DONE:
            row["moved"] = self._execution.moved_bytes
        if error is not None:
            row["error"] = error
        return row
