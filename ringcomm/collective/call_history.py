"""The flight recorder's part in a runner: its last operations.

It is always on, so a small message takes a short way through it: a list of references, a look at the clock,
and the place of the call. Texts are made from it only on request.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional

from ..clock import monotonic
from .call_sites import Site, site_text

Row = Dict[str, Any]
"""An operation as a record, ready for JSON.

``op`` (its number), ``kind``, ``name``, ``what`` (the call as a person would write it), ``site``
(``file:line``), ``state``, ``began`` (monotonic seconds), ``moved`` (bytes, where it is running or has
failed), ``error`` (where it has failed).
"""

KEPT = 1000
"""How many of its last operations a rank records, in each channel."""

SUBMITTED, RUNNING, DONE, FAILED = "submitted", "running", "done", "failed"
"""The states of an operation; ``submitted``: it waits for other ranks to submit it as well."""


class CallHistory:
    """The last operations of one runner, at most ``capacity``."""

    __slots__ = ("_calls", "_failure", "on_failure")

    def __init__(self, capacity: int) -> None:
        self._calls: Deque[Any] = deque(maxlen=capacity)
        self._failure: Optional[Row] = None
        self.on_failure: Optional[Callable[[BaseException], None]] = None  # called when an operation fails

    def begin(self, sequence: int, call: Any, site: Site) -> None:
        """Record that a call starts, which was made at this site."""
        self._calls.append((sequence, call, site, monotonic()))

    def fail(self, error: BaseException, moved_bytes: int) -> None:
        """Record that the call has failed. It is the last one: the streams have stopped in mid-message."""
        text = f"{type(error).__name__}: {error}"
        self._failure = {"state": FAILED, "moved": moved_bytes, "error": text}
        if self.on_failure is not None:
            self.on_failure(error)

    def rows(self, moved_bytes: Optional[int] = None) -> List[Row]:
        """Return all records, oldest first. For any thread. ``moved_bytes``: of a call that still runs."""
        rows = [_row(*entry) for entry in list(self._calls)]
        if rows and self._failure is not None:
            rows[-1].update(self._failure)
        elif rows and moved_bytes is not None:
            rows[-1].update(state=RUNNING, moved=moved_bytes)
        return rows


def _row(sequence: int, call: Any, site: Any, began_s: float) -> Row:
    return {
        "op": sequence, "kind": call.verb, "name": call.name, "what": call.describe(),
        "site": site_text(site), "state": DONE, "began": began_s,
    }  # fmt: skip
