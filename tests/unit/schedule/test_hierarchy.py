"""Hierarchical collectives of every grid of up to 64 ranks, and how little they put on the wire."""

from __future__ import annotations

import pytest

from ringcomm.schedule import hierarchy
from ringcomm.schedule.hierarchy import hosts_of
from ringcomm.schedule.steps import Recv, Send, even_bounds
from tests.support.prover.verify import check_all_gather, check_all_reduce, check_reduce_scatter


def grid(hosts, places, scattered=False):
    """Ranks in the order of the hosts, or assigned to the hosts one by one."""
    size = hosts * places
    if scattered:
        return tuple(tuple(range(host, size, hosts)) for host in range(hosts))
    return tuple(tuple(range(host * places, (host + 1) * places)) for host in range(hosts))


def spans(bounds):
    return list(zip(bounds, bounds[1:]))


def uneven(size, count):
    return tuple(sorted([0, count, *((7 * i) % (count + 1) for i in range(1, size))]))


def check(hosts, count, bounds):
    size = len(bounds) - 1
    check_all_reduce([hierarchy.all_reduce(r, hosts, bounds) for r in range(size)], count)
    scatter = [hierarchy.reduce_scatter(r, hosts, spans(bounds)) for r in range(size)]
    check_reduce_scatter(scatter, bounds)
    check_all_gather([hierarchy.all_gather(r, hosts, spans(bounds)) for r in range(size)], bounds)


@pytest.mark.sampled
@pytest.mark.parametrize("size", range(1, 65))
def test_every_grid_of_all_sizes(size):
    for places in range(1, size + 1):
        if size % places == 0 and (size <= 16 or 1 < places < size):
            hosts, bounds = grid(size // places, places), even_bounds(size + 1, size)
            check_all_reduce([hierarchy.all_reduce(r, hosts, bounds) for r in range(size)], size + 1)
            if size <= 16:
                check(hosts, size + 1, bounds)


@pytest.mark.parametrize(("hosts", "places"), [(2, 2), (3, 2), (2, 4), (4, 3)])
@pytest.mark.parametrize("scattered", [False, True])
def test_other_counts_uneven_chunks_and_ranks_in_any_order(hosts, places, scattered):
    size = hosts * places
    for count in (0, 1, size - 1, 3 * size + 2):
        for bounds in (even_bounds(count, size), uneven(size, count)):
            check(grid(hosts, places, scattered), count, bounds)


@pytest.mark.parametrize(("hosts", "places"), [(2, 2), (3, 4), (4, 2)])
def test_a_host_sends_no_more_than_if_it_had_one_rank(hosts, places):
    size, count = hosts * places, 10 * hosts * places
    host_of = {rank: host for host, ranks in enumerate(grid(hosts, places)) for rank in ranks}
    out = [0] * hosts
    for rank in range(size):
        steps = hierarchy.all_reduce(rank, grid(hosts, places), even_bounds(count, size))
        for step in steps:
            if isinstance(step, Send) and host_of[step.peer] != host_of[rank]:
                out[host_of[rank]] += step.stop - step.start
    assert out == [2 * (hosts - 1) * count // hosts] * hosts


def test_folds_are_in_the_order_of_the_hosts_and_their_ranks():
    steps = hierarchy.all_reduce(3, ((0, 1), (2, 3), (4, 5)), even_bounds(12, 6))
    folds = [step.fold for step in steps if isinstance(step, Recv) and step.fold]
    assert folds == [(2, -1)] * 3 + [(1, -1, 5)]


@pytest.mark.parametrize(
    ("host_index", "expected"),
    [
        ([0, 0, 1, 1], ((0, 1), (2, 3))),
        ([5, 2, 5, 2], ((1, 3), (0, 2))),
        ([0, 0, 0, 0], None),
        ([0, 1, 2], None),
        ([0, 0, 1], None),
        ([0], None),
    ],
)
def test_which_jobs_make_a_grid(host_index, expected):
    assert hosts_of(host_index) == expected
