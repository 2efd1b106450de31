"""An all-reduce with a codec where several ranks share each host: only codes cross the network.

All ranks of a host share its interface. So they add up first, in float32 over the host's own links, and every
rank gets one column of the host's sum. Ranks with the same place on their hosts exchange their column as
codes, and the ranks of a host gather the columns. A host then sends as much as a single rank would, every
element is still encoded twice, and all ranks end with the same bits, because a column's result is copied.

The three stages follow each other: those inside a host take little of the time of a network for which codes
are worth while.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ..ops import ReduceOp
from ..schedule.hierarchy import Hosts, all_gather, reduce_scatter
from ..schedule.steps import even_bounds
from ..transport.base import Fabric, Link
from ..wire.frames import Header
from .execute import Execution
from .flows import SegmentPool
from .part import Part
from .reduce import Kernel

MakeCoded = Callable[[Tuple[int, ...], int], Part]
"""Makes the part that reduces a column of this many elements over these ranks with codes."""


class HostCodedExecution(Part):
    """Reduces inside the hosts, with codes between them, and gathers inside the hosts.

    ``arm`` takes the vector of float32 as ``data``, and as ``source`` residuals, if errors are fed back; they
    are those of this rank's column. ``make_coded`` makes the stage between hosts.
    """

    def __init__(
        self, fabric: Fabric, header: Header, hosts: Hosts, count: int, pool: SegmentPool,
        make_coded: MakeCoded,
    ) -> None:  # fmt: skip
        local = next(ranks for ranks in hosts if fabric.rank in ranks)
        place = local.index(fabric.rank)
        edges = even_bounds(count, len(local))
        self._own = slice(edges[place], edges[place + 1])
        spans = [(0, 0)] * (max(rank for ranks in hosts for rank in ranks) + 1)
        for rank, span in zip(local, zip(edges, edges[1:])):
            spans[rank] = span
        single = np.dtype(np.float32)
        add = Kernel(ReduceOp.SUM, single, len(local))
        inward = Execution(reduce_scatter(fabric.rank, (local,), spans), fabric, header, single, pool, add)
        coded = make_coded(tuple(ranks[place] for ranks in hosts), edges[place + 1] - edges[place])
        outward = Execution(all_gather(fabric.rank, (local,), spans), fabric, header, single, pool)
        self._stages: Tuple[Part, ...] = (inward, coded, outward)
        self.slept_s = {}
        self._stage = 0
        self._done_bytes = 0

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        """Return the bytes moved in all stages since it was armed."""
        return self._done_bytes + self._stages[self._stage].moved_bytes

    def arm(
        self,
        sequence: int,
        data: np.ndarray[Any, Any],
        source: Optional[np.ndarray[Any, Any]] = None,
    ) -> None:
        self._armed = (sequence, data, source)
        if source is not None:
            # Of other columns, from calls before the hosts had these ranks.
            for others in (slice(0, self._own.start), slice(self._own.stop, None)):
                if source[others].any():
                    np.add(data[others], source[others], out=data[others])
                    source[others] = 0
        self._stage = self._done_bytes = 0
        self._stages[0].arm(sequence, data)

    def _arm_next(self) -> None:
        sequence, data, source = self._armed
        self._done_bytes += self._stages[self._stage].moved_bytes
        self._stages[self._stage].disarm()
        self._stage += 1
        if self._stage == 1:
            residuals = None if source is None else source[self._own]
            self._stages[1].arm(sequence, data[self._own], residuals)
        else:
            self._stages[2].arm(sequence, data)

    def disarm(self) -> None:
        self._stages[self._stage].disarm()
        del self._armed

    def advance(self) -> bool:
        while self._stages[self._stage].advance():
            if self._stage == len(self._stages) - 1:
                return True
            self._arm_next()
        return False

    def exchanged(self) -> Dict[int, Tuple[int, int]]:
        return _summed([stage.exchanged() for stage in self._stages[: self._stage + 1]])

    def volume(self) -> Dict[int, Tuple[int, int]]:
        return _summed([stage.volume() for stage in self._stages])

    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        return self._stages[self._stage].waiting_for()


def _summed(parts: Sequence[Dict[int, Tuple[int, int]]]) -> Dict[int, Tuple[int, int]]:
    total: Dict[int, Tuple[int, int]] = {}
    for part in parts:
        for peer, (sent, received) in part.items():
            before = total.get(peer, (0, 0))
            total[peer] = (before[0] + sent, before[1] + received)
    return total
