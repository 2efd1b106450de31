"""The ring, proven for all sizes, and the shape that its docstring promises."""

from __future__ import annotations

import pytest

from ringcomm.schedule import ring
from ringcomm.schedule.steps import Recv, Send, even_bounds
from tests.support.prover.verify import check_all_gather, check_all_reduce, check_reduce_scatter

SOME_SIZES = [*range(1, 18), 33]


@pytest.mark.sampled
@pytest.mark.parametrize("size", range(1, 65))
def test_all_reduce_of_all_sizes(size):
    count = size + 1
    check_all_reduce([ring.all_reduce(r, size, even_bounds(count, size)) for r in range(size)], count)


@pytest.mark.parametrize("size", SOME_SIZES)
def test_reduce_scatter_and_all_gather(size):
    bounds = even_bounds(size + 1, size)
    check_reduce_scatter([ring.reduce_scatter(r, size, bounds) for r in range(size)], bounds)
    check_all_gather([ring.all_gather(r, size, bounds) for r in range(size)], bounds)


@pytest.mark.parametrize(
    "bounds", [(0, 0, 0, 0), (0, 0, 1, 2), (0, 2, 2, 9), (0, 0, 0, 100), (0, 100, 100, 100), (5, 6, 9, 9)]
)
def test_uneven_and_empty_chunks(bounds):
    check_reduce_scatter([ring.reduce_scatter(r, 3, bounds) for r in range(3)], bounds)
    check_all_gather([ring.all_gather(r, 3, bounds) for r in range(3)], bounds)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_rank_sends_only_to_neighbours_and_even_nothing(size):
    full = ring.all_reduce(1, size, even_bounds(100, size))
    empty = ring.all_reduce(1, size, even_bounds(0, size))
    assert [type(s) for s in full] == [type(s) for s in empty]
    assert {s.peer for s in full if isinstance(s, Send)} == {2 % size}
    assert {s.peers for s in full if isinstance(s, Recv)} == {(0,)}


def test_each_rank_sends_as_little_as_possible():
    size, count = 8, 8000
    steps = ring.all_reduce(3, size, even_bounds(count, size))
    assert sum(s.stop - s.start for s in steps if isinstance(s, Send)) == 2 * (size - 1) * count // size
