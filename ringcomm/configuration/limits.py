"""How many ranks a job may have while it runs, and how long it waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

ELASTIC_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Limits:
    """The limits of an elastic job.

    Attributes:
        start_np: the first view waits for so many ranks; a launcher starts none before it has as many slots.
        min_np: fewest ranks with which training continues; with fewer the job waits for more.
        max_np: most ranks; None for no limit.
        reset_limit: how often the ranks may change after the first start; None for no limit.
        timeout_s: how long the job waits for ``start_np`` slots, and for ``min_np`` ranks, in seconds.
    """

    start_np: int = 1
    min_np: int = 1
    max_np: Optional[int] = None
    reset_limit: Optional[int] = None
    timeout_s: float = ELASTIC_TIMEOUT_S

    @property
    def most(self) -> int:
        """The largest view."""
        return self.max_np if self.max_np is not None else 2**30

    @property
    def name(self) -> str:
        """What the limits are those of, in error texts."""
        return "The job"

    def reset_limit_text(self) -> str:
        """Return the error if the ranks would change more often than :attr:`reset_limit` permits.

        Programs may search for it: it is Horovod's.
        """
        return (
            f"{self.name} was shutdown because number of resets during elastic job exceeded limit: "
            f"{self.reset_limit}"
        )
