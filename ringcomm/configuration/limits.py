"""The limits of an elastic job: numbers of ranks, restarts, and waiting time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

ELASTIC_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Limits:
    """The limits of an elastic job."""

    start_np: int = 1  # the first view waits for this many ranks, and a launcher for this many slots
    min_np: int = 1  # with fewer ranks the job waits for more
    max_np: Optional[int] = None  # None: no limit
    timeout_s: float = ELASTIC_TIMEOUT_S  # longest wait for start_np slots, and for min_np ranks

    @property
    def most(self) -> int:
        """Return the size of the largest view."""
        return self.max_np if self.max_np is not None else 2**30
