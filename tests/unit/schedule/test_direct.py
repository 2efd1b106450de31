"""Direct exchange, one-shot and all-to-all, proven for all sizes."""

from __future__ import annotations

import random

import pytest

from ringcomm.schedule import direct
from ringcomm.schedule.steps import SOURCE, Recv, Send, even_bounds
from tests.support.prover.verify import (
    check_all_gather,
    check_all_reduce,
    check_all_to_all,
    check_reduce_scatter,
)

SOME_SIZES = [*range(1, 18), 33]


def exchange_bounds(lengths):
    """Send and receive bounds of all ranks, where rank i sends lengths[i][j] elements to rank j."""
    size = len(lengths)
    columns = [[lengths[i][j] for i in range(size)] for j in range(size)]
    sums = [[tuple(sum(row[:k]) for k in range(size + 1)) for row in rows] for rows in (lengths, columns)]
    return sums[0], sums[1]


def all_to_all(lengths):
    sends, recvs = exchange_bounds(lengths)
    size = len(lengths)
    return [direct.all_to_all(r, size, sends[r], recvs[r]) for r in range(size)], sends, recvs


@pytest.mark.sampled
@pytest.mark.parametrize("size", range(1, 65))
def test_all_reduce_of_all_sizes(size):
    count = size + 1
    schedules = [direct.all_reduce(r, size, even_bounds(count, size)) for r in range(size)]
    check_all_reduce(schedules, count, single_fold=True)


@pytest.mark.sampled
@pytest.mark.parametrize("size", range(1, 65))
def test_one_shot_of_all_sizes(size):
    check_all_reduce([direct.one_shot(r, size, 1) for r in range(size)], 1, single_fold=True)


@pytest.mark.parametrize("size", SOME_SIZES)
def test_reduce_scatter_and_all_gather(size):
    bounds = even_bounds(size + 1, size)
    schedules = [direct.reduce_scatter(r, size, bounds) for r in range(size)]
    check_reduce_scatter(schedules, bounds, single_fold=True)
    check_all_gather([direct.all_gather(r, size, bounds) for r in range(size)], bounds)


@pytest.mark.parametrize("bounds", [(0, 0, 0, 0), (0, 0, 1, 2), (0, 2, 2, 9), (0, 0, 0, 100), (5, 6, 9, 9)])
def test_uneven_and_empty_chunks(bounds):
    check_reduce_scatter([direct.reduce_scatter(r, 3, bounds) for r in range(3)], bounds)
    check_all_gather([direct.all_gather(r, 3, bounds) for r in range(3)], bounds)


@pytest.mark.parametrize("size", [*range(1, 10), 17, 64])
def test_all_to_all_of_uneven_lengths(size):
    draw = random.Random(size)
    check_all_to_all(*all_to_all([[draw.choice([0, 1, 2, 50]) for _ in range(size)] for _ in range(size)]))


def test_all_to_all_of_nothing_still_sends_to_all_ranks():
    schedules, sends, recvs = all_to_all([[0] * 4 for _ in range(4)])
    check_all_to_all(schedules, sends, recvs)
    assert [s.peer for s in schedules[1] if isinstance(s, Send)] == [2, 3, 0]
    assert [s.peers for s in schedules[1] if isinstance(s, Recv)] == [(0,), (3,), (2,)]
    assert all(s.buffer == SOURCE for s in schedules[1] if isinstance(s, Send))


@pytest.mark.parametrize("build", [direct.all_reduce, direct.all_gather, direct.reduce_scatter])
def test_an_empty_message_goes_to_the_same_peers(build):
    full, empty = build(1, 5, even_bounds(100, 5)), build(1, 5, even_bounds(0, 5))
    assert [s._replace(start=0, stop=0) for s in full] == empty
