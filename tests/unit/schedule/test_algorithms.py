"""Every registered algorithm, proven for 1 to 64 ranks, and the shapes that their docstrings promise."""

from __future__ import annotations

import doctest
import importlib
import random
from pathlib import Path

import pytest

from ringcomm.schedule import direct, hierarchy, tree
from ringcomm.schedule.hierarchy import hosts_of
from ringcomm.schedule.registry import algorithm
from ringcomm.schedule.steps import SOURCE, Recv, Send, even_bounds
from tests.support.prover.verify import (
    check_all_gather,
    check_all_reduce,
    check_all_to_all,
    check_broadcast,
    check_reduce_scatter,
)
from tests.unit.schedule.building import make, names


def prove(collective, name, size, count, bounds=None, hosts=None, root=0):
    """Build all ranks' schedules, and prove that they compute the collective."""
    bounds = even_bounds(count, size) if bounds is None else bounds
    options = {"bounds": bounds, "hosts": hosts, "root": root}
    schedules = [make(collective, name, rank, size, count, **options) for rank in range(size)]
    single = algorithm(collective, name).single_fold
    if collective == "allreduce":
        check_all_reduce(schedules, count, single_fold=single)
    elif collective == "reducescatter":
        check_reduce_scatter(schedules, bounds, single_fold=single)
    elif collective == "allgather":
        check_all_gather(schedules, bounds)
    else:
        check_broadcast(schedules, root, count)


def grids(size):
    """The hosts of ranks in order, with several on each of several."""
    return [
        tuple(tuple(range(first, first + places)) for first in range(0, size, places))
        for places in range(2, size // 2 + 1)
        if size % places == 0
    ]


ALL = [(collective, name) for collective in ("allreduce", "reducescatter", "allgather", "broadcast")
       for name in names(collective)]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("size", range(1, 65))
@pytest.mark.parametrize(("collective", "name"), ALL)
def test_all_sizes(collective, name, size):
    prove(collective, name, size, size + 1, root=size // 2)
    if collective == "allreduce" or size <= 8:
        for count in (0, 1):
            prove(collective, name, size, count, root=size - 1)


@pytest.mark.sampled
@pytest.mark.parametrize("size", range(4, 65))
def test_every_grid_of_hosts(size):
    for hosts in grids(size):
        prove("allreduce", "hierarchical", size, size + 1, hosts=hosts)
        if size <= 16:
            for collective in ("reducescatter", "allgather"):
                prove(collective, "hierarchical", size, size + 1, hosts=hosts)


@pytest.mark.parametrize("bounds", [(0, 0, 0, 1, 1, 2, 2), (0, 2, 2, 9, 9, 9, 9), (5, 6, 9, 9, 9, 30, 31)])
@pytest.mark.parametrize("hosts", [None, ((0, 1, 2), (3, 4, 5)), ((0, 2, 4), (1, 3, 5))])
def test_uneven_and_empty_chunks_and_ranks_in_any_order(hosts, bounds):
    for collective in ("reducescatter", "allgather"):
        for name in ["hierarchical"] if hosts else names(collective):
            prove(collective, name, 6, bounds[-1], bounds, hosts)


@pytest.mark.parametrize("size", [*range(1, 10), 17, 64])
def test_all_to_all_of_uneven_lengths(size):
    draw = random.Random(size)
    lengths = [[draw.choice([0, 1, 2, 50]) for _ in range(size)] for _ in range(size)]
    columns = [[lengths[i][j] for i in range(size)] for j in range(size)]
    sends, recvs = (
        [tuple(sum(row[:k]) for k in range(size + 1)) for row in rows] for rows in (lengths, columns)
    )
    schedules = [direct.all_to_all(r, size, sends[r], recvs[r]) for r in range(size)]
    check_all_to_all(schedules, sends, recvs)
    assert all(step.buffer == SOURCE for steps in schedules for step in steps if isinstance(step, Send))


@pytest.mark.parametrize("hosts", [grids(4)[0], *grids(12)])
def test_a_host_sends_no_more_than_if_it_had_one_rank(hosts):
    size = sum(map(len, hosts))
    count, host_of = 10 * size, {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    out = [0] * len(hosts)
    for rank in range(size):
        for step in hierarchy.all_reduce(rank, hosts, even_bounds(count, size)):
            if isinstance(step, Send) and host_of[step.peer] != host_of[rank]:
                out[host_of[rank]] += step.stop - step.start
    assert out == [2 * (len(hosts) - 1) * count // len(hosts)] * len(hosts)


@pytest.mark.parametrize(
    ("host_index", "expected"),
    [
        ([0, 0, 1, 1], ((0, 1), (2, 3))), ([5, 2, 5, 2], ((1, 3), (0, 2))),
        ([0, 0, 0, 0], None), ([0, 1, 2], None), ([0, 0, 1], None), ([0], None),
    ],
)  # fmt: skip
def test_which_jobs_make_a_grid(host_index, expected):
    assert hosts_of(host_index) == expected


@pytest.mark.parametrize("size", [2, 3, 12, 64])
def test_whatever_the_arguments_of_a_broadcast_each_rank_receives_from_the_same_parent(size):
    for build, root, count in ((tree.broadcast, 0, 1), (tree.broadcast, size - 1, 0), (tree.chain, 1, 7)):
        for rank in range(size):
            steps = build(rank, size, root, count)
            heard = {peer for step in steps if isinstance(step, Recv) for peer in step.peers}
            served = {step.peer for step in steps if isinstance(step, Send)}
            assert rank == 0 or rank & (rank - 1) in heard
            assert served >= {peer for peer in range(rank + 1, size) if peer & (peer - 1) == rank}


@pytest.mark.parametrize("module", sorted(path.stem for path in Path(tree.__file__).parent.glob("[a-z]*.py")))
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"ringcomm.schedule.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
