"""The flight recorder's part in a runner: its last operations, as many as are kept.

It is always on, so the way of a small message through it is short: a list of references, a look at the
clock, and where the call came from. Texts are made from it only on request.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional

from ..clock import monotonic
from .call_sites import Site, site_text

Row = Dict[str, Any]
"""An operation as it is written down, ready for JSON.

``op`` (its number), ``kind``, ``name``, ``what`` (the call as a person would write it), ``site``
(``file:line``), ``state``, ``began`` (monotonic seconds), ``moved`` (bytes, where it is running or has
failed), ``error`` (where it has failed).
"""

SUBMITTED, RUNNING, DONE, FAILED = "submitted", "running", "done", "failed"
"""What may have become of an operation; ``submitted``: it waits for other ranks to submit it, too."""


class CallHistory:
    """What one runner has run.

    Args:
        capacity: how many operations are kept.

    Attributes:
        on_failure: told of the error when an operation fails, if set.
    """

    __slots__ = ("_calls", "_failure", "on_failure")

    def __init__(self, capacity: int) -> None:
        self._calls: Deque[Any] = deque(maxlen=capacity)
        self._failure: Optional[Row] = None
        self.on_failure: Optional[Callable[[BaseException], None]] = None

    def begin(self, sequence: int, call: Any, site: Site) -> None:
        """A call starts to run that was made there."""
        self._calls.append((sequence, call, site, monotonic()))

    def fail(self, error: BaseException, moved_bytes: int) -> None:
        """The call has failed. There will be no other: the streams have stopped in mid-message."""
        text = f"{type(error).__name__}: {error}"
        self._failure = {"state": FAILED, "moved": moved_bytes, "error": text}
        if self.on_failure is not None:
            self.on_failure(error)

    def rows(self, moved_bytes: Optional[int] = None) -> List[Row]:
        """All that is kept, oldest first. For any thread.

        Args:
            moved_bytes: by the last call, if it still runs.
        """
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
