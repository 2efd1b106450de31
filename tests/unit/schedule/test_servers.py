"""All-reduce through parameter servers: proven where servers are workers, run by the executor where not."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.reduce import Kernel
from ringcomm.ops import Sum
from ringcomm.schedule import direct
from ringcomm.schedule.steps import even_bounds, exchange_lengths
from tests.support import servers
from tests.support.prover.verify import check_all_reduce
from tests.support.simulation import simulate


@pytest.mark.parametrize("workers", range(2, 10))
def test_servers_among_the_workers(workers):
    for count in range(1, workers + 1):
        bounds = even_bounds(23, count)
        schedules = [servers.all_reduce(r, range(workers), range(count), bounds) for r in range(workers)]
        check_all_reduce(schedules, 23, single_fold=True)


@pytest.mark.parametrize(("workers", "count"), [(1, 1), (2, 1), (3, 2), (4, 4), (2, 5)])
def test_servers_of_their_own_contribute_nothing(workers, count):
    size, length = workers + count, 41
    bounds = even_bounds(length, count)
    owners = range(workers, size)
    schedules = [servers.all_reduce(rank, range(workers), owners, bounds) for rank in range(size)]
    for seed in range(3):
        data = [np.full(length, rank + 1 if rank < workers else 0, np.float32) for rank in range(size)]
        errors = simulate(
            schedules, data, seed=seed, kernel=lambda: Kernel(Sum, np.dtype(np.float32), size),
            segment_bytes=[16, 4096, 64][seed], capacity_bytes=[7, 1 << 20, 100][seed],
        )  # fmt: skip
        assert errors == [None] * size
        for rank in range(workers):
            assert (data[rank] == workers * (workers + 1) / 2).all(), (seed, rank)


def test_every_rank_a_server_moves_what_direct_moves():
    bounds = even_bounds(60, 5)
    for rank in range(5):
        own = servers.all_reduce(rank, range(5), range(5), bounds)
        assert exchange_lengths(own) == exchange_lengths(direct.all_reduce(rank, 5, bounds))


def test_one_server_carries_everything():
    schedules = [servers.all_reduce(rank, range(4), [0], (0, 10)) for rank in range(4)]
    assert exchange_lengths(schedules[0]) == {1: (10, 10), 2: (10, 10), 3: (10, 10)}
    assert exchange_lengths(schedules[3]) == {0: (10, 10)}
