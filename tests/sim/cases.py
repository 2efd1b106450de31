"""Every algorithm as something that can be simulated: schedules, inputs, and the right answer."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ringcomm.collective.reduce import Kernel
from ringcomm.ops import Sum
from ringcomm.schedule import direct
from ringcomm.schedule.steps import Step, even_bounds
from tests.unit.schedule.building import make as make_schedule
from tests.unit.schedule.building import names

Arrays = List[np.ndarray]


class Case(NamedTuple):
    """A collective to simulate.

    ``expected`` holds, for each rank, pairs of a span of its data and what must stand there.
    """

    schedules: Sequence[Sequence[Step]]
    data: Arrays
    expected: List[List[Tuple[slice, np.ndarray]]]
    reduces: bool
    sources: Optional[Arrays] = None

    def kernel(self) -> Optional[Callable[[], Kernel]]:
        """Makes the kernels, if the schedules fold."""
        size, dtype = len(self.schedules), self.data[0].dtype
        return (lambda: Kernel(Sum, dtype, size)) if self.reduces else None

    def check(self, rank: int) -> None:
        """Fail unless this rank's data is what it must be."""
        for span, expected in self.expected[rank]:
            np.testing.assert_array_equal(self.data[rank][span], expected)


def _whole_numbers(size: int, count: int, dtype: Any) -> Arrays:
    """Contributions whose sums are exact, whatever the order."""
    random = np.random.default_rng(1000 * size + count)
    return [random.integers(-50, 50, count).astype(dtype) for _ in range(size)]


def _scheduled(collective: str, name: str) -> Callable[[int, int, Any], Case]:
    def make(size: int, count: int, dtype: Any) -> Case:
        data, root, everything = _whole_numbers(size, count, dtype), count % size, slice(None)
        total = np.sum(data, axis=0, dtype=dtype)
        options: Dict[str, Any] = {"root": root} if collective == "broadcast" else {"hosts": grid(size)}
        bounds = _uneven(size, count)
        if collective in ("reducescatter", "allgather"):
            options["bounds"] = bounds
        spans = [slice(bounds[rank], bounds[rank + 1]) for rank in range(size)]
        whole = np.concatenate([array[span] for array, span in zip(data, spans)])
        expected = {
            "allreduce": [[(everything, total)]] * size,
            "reducescatter": [[(span, total[span])] for span in spans],
            "allgather": [[(everything, whole)]] * size,
            "broadcast": [[(everything, data[root].copy())]] * size,
        }[collective]
        schedules = [make_schedule(collective, name, rank, size, count, **options) for rank in range(size)]
        return Case(schedules, data, expected, collective in ("allreduce", "reducescatter"))

    return make


def _all_to_all(size: int, count: int, dtype: Any) -> Case:
    lengths = [[(count + 3 * i + 5 * j) % 7 if count else 0 for j in range(size)] for i in range(size)]
    out = [tuple(np.cumsum([0, *lengths[i]]).tolist()) for i in range(size)]
    into = [tuple(np.cumsum([0, *(row[j] for row in lengths)]).tolist()) for j in range(size)]
    sources = [_whole_numbers(1, out[i][-1] + i, dtype)[0] for i in range(size)]
    data = [np.zeros(into[j][-1], dtype) for j in range(size)]
    expected = [
        [
            (slice(into[j][i], into[j][i + 1]), sources[i][out[i][j] : out[i][j + 1]])
            for i in range(size)
            if i != j
        ]
        for j in range(size)
    ]
    schedules = [direct.all_to_all(rank, size, out[rank], into[rank]) for rank in range(size)]
    return Case(schedules, data, expected, False, sources)


def grid(size: int) -> Tuple[Tuple[int, ...], ...]:
    """As many hosts as the least divisor of the number of ranks says; ranks are assigned one by one."""
    hosts = next((number for number in range(2, size) if size % number == 0), size)
    return tuple(tuple(range(host, size, hosts)) for host in range(hosts))


def _uneven(size: int, count: int) -> Tuple[int, ...]:
    """Boundaries with chunks of very different lengths, some of them empty."""
    if size == 1 or count % 2:
        return even_bounds(count, size)
    return tuple(sorted([0, count, *((7 * i) % (count + 1) for i in range(1, size))]))


CASES: Dict[str, Callable[[int, int, Any], Case]] = {
    f"{collective}-{name}": _scheduled(collective, name)
    for collective in ("allreduce", "reducescatter", "allgather", "broadcast")
    for name in names(collective, hosts=collective != "broadcast")
}
CASES["alltoall"] = _all_to_all
