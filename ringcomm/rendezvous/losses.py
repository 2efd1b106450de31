"""Selects the connected processes that an elastic job continues without after a failed epoch. Pure."""

from __future__ import annotations

from typing import FrozenSet, List, Optional, Sequence

from ..group.view import View
from .processes import Process, Stage


class Losses:
    """Selects them by how the epochs of one job have failed."""

    def __init__(self) -> None:
        self._last: FrozenSet[int] = frozenset()

    def left_out(
        self, kind: str, culprit: Optional[Process], apart: Sequence[Optional[Process]], before: View
    ) -> List[Process]:
        """Return the processes without which the job continues. ``apart``: processes that do not reach each
        other; ``before``: the view before the failed one (new processes are left out first).
        """
        if kind == "stalled" and culprit is not None:
            return [culprit] if culprit.stage is Stage.IN_VIEW else []
        if kind not in ("cut", "no_route"):
            return []
        found = [item for item in apart if item is not None and item.stage is Stage.IN_VIEW]
        # A link that has worked may work again: one is left out only if it is cut in two epochs, one after
        # the other.
        numbers = frozenset(item.number for item in found)
        again, self._last = numbers & self._last, numbers
        if len(found) < 2 or (kind == "cut" and not again):
            return []
        return [max(found, key=lambda item: (item.number not in before.numbers, item.rank))]
