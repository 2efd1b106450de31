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


def _all_reduce(name: str) -> Callable[[int, int, Any], Case]:
    def make(size: int, count: int, dtype: Any) -> Case:
        data = _whole_numbers(size, count, dtype)
        total = np.sum(data, axis=0, dtype=dtype)
        hosts = grid(size)
        schedules = [make_schedule("allreduce", name, rank, size, count, hosts=hosts) for rank in range(size)]
        return Case(schedules, data, [[(slice(None), total)]] * size, True)

    return make


def _reduce_scatter(name: str) -> Callable[[int, int, Any], Case]:
    def make(size: int, count: int, dtype: Any) -> Case:
        data, bounds = _whole_numbers(size, count, dtype), _uneven(size, count)
        total = np.sum(data, axis=0, dtype=dtype)
        spans = [slice(bounds[rank], bounds[rank + 1]) for rank in range(size)]
        schedules = [
            make_schedule("reducescatter", name, rank, size, count, bounds=bounds, hosts=grid(size))
            for rank in range(size)
        ]
        return Case(schedules, data, [[(span, total[span])] for span in spans], True)

    return make


def _all_gather(name: str) -> Callable[[int, int, Any], Case]:
    def make(size: int, count: int, dtype: Any) -> Case:
        data, bounds = _whole_numbers(size, count, dtype), _uneven(size, count)
        whole = np.concatenate([data[rank][bounds[rank] : bounds[rank + 1]] for rank in range(size)])
        schedules = [
            make_schedule("allgather", name, rank, size, count, bounds=bounds, hosts=grid(size))
            for rank in range(size)
        ]
        return Case(schedules, data, [[(slice(None), whole)]] * size, False)

    return make


def _broadcast(name: str) -> Callable[[int, int, Any], Case]:
    def make(size: int, count: int, dtype: Any) -> Case:
        root = count % size
        data = _whole_numbers(size, count, dtype)
        schedules = [make_schedule("broadcast", name, rank, size, count, root=root) for rank in range(size)]
        return Case(schedules, data, [[(slice(None), data[root].copy())]] * size, False)

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
    **{f"all_reduce-{name}": _all_reduce(name) for name in names("allreduce", hosts=True)},
    **{
        f"reduce_scatter-{name}": _reduce_scatter(name)
        for name in names("reducescatter", hosts=True)
    },
    **{f"all_gather-{name}": _all_gather(name) for name in names("allgather", hosts=True)},
    **{f"broadcast-{name}": _broadcast(name) for name in names("broadcast")},
    "all_to_all": _all_to_all,
}
