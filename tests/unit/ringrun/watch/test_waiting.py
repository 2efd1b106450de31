"""Which rank the others wait for: it is found, and none where ranks are equal."""

from __future__ import annotations

import pytest

from ringrun.watch.numbers import parse_sample
from ringrun.watch.waiting import Waits, slowest_rank, totals_of, waiting_matrix, waits_between
from tests.unit.ringrun.watch.samples import report

HOSTS = {0: "desk", 1: "jetson1", 2: "jetson2"}
PERIOD_S = 10.0


def waits(waited_s, links=None):
    """By rank, waits without anything else; ``links``: by rank and other rank, (MB, seconds)."""
    found = {}
    for rank, seconds in enumerate(waited_s):
        delivered = {
            other: (int(1e6 * size), busy_s)
            for (own, other), (size, busy_s) in (links or {}).items()
            if own == rank
        }
        found[rank] = Waits(seconds, {}, {}, delivered)
    return found


def slowest(found, hosts=None):
    item = slowest_rank(found, HOSTS if hosts is None else hosts, PERIOD_S)
    return None if item is None else (item.rank, round(item.share, 2), item.link_mb_per_s)


def test_the_rank_that_computes_longest_waits_least():
    assert slowest(waits([7.0, 7.0, 0.5])) == (2, 0.65, 0.0)
    assert slowest(waits([0.1, 7.0, 5.0])) == (0, 0.59, 0.0)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_equal_ranks_wait_for_none(size):
    hosts = {rank: f"host{rank}" for rank in range(size)}
    links = {(a, b): (100.0, 9.0) for a in hosts for b in hosts if a != b}
    assert slowest(waits([5.0 + 0.1 * rank for rank in range(size)], links), hosts) is None


LINKS = {
    (0, 1): (50.0, 0.4), (1, 0): (50.0, 0.5), (1, 2): (60.0, 8.0), (2, 1): (60.0, 8.0)
}  # fmt: skip
"""Rank 1 reduces: all exchange data with it only. The link of rank 2 is slow."""


def test_a_slow_link_of_one_host():
    assert slowest(waits([9.3, 9.3, 9.3], LINKS)) == (2, 0.8, 7.5)


@pytest.mark.parametrize(
    "changed",
    [
        {(1, 2): (60.0, 1.0), (2, 1): (60.0, 1.0)},  # it has little to do
        {(0, 1): (50.0, 4.0), (1, 0): (50.0, 4.0)},  # the others are not much faster
        {(1, 2): (0.5, 8.0), (2, 1): (0.5, 8.0)},  # too little to say anything
    ],
)
def test_a_link_that_does_not_hold_the_job_up(changed):
    assert slowest(waits([9.3, 9.3, 9.3], {**LINKS, **changed})) is None


def test_two_ranks_behind_the_same_slow_link():
    hosts = {0: "desk", 1: "jetson1", 2: "jetson2", 3: "jetson2"}
    links = {**LINKS, (1, 3): (60.0, 8.0), (3, 1): (60.0, 8.0), (2, 3): (0.0, 0.0)}
    assert slowest(waits([9.0] * 4, links), hosts) == (2, 0.8, 7.5)


def test_a_slow_link_between_two_hosts_is_a_matter_of_both():
    links = {(0, 1): (60.0, 8.0), (1, 0): (60.0, 8.0)}
    assert slowest(waits([9.0, 9.0], links)) is None


def test_lateness_is_never_more_than_it_was():
    """A rank that waits for large transfers does not wait for ranks that were hardly late."""
    matrix = waiting_matrix({0: Waits(9.0, {}, {1: 0.2}, {}), 1: Waits(9.0, {}, {}, {})})
    assert matrix == {(0, 1): pytest.approx(0.2), (1, 0): 0.0}


def test_a_period_is_the_difference_of_two_reports():
    peers = {"1": [0, 0, 0.5, 10, 1.0]}, {"1": [0, 0, 1.5, 40, 3.0]}
    first = parse_sample(report(0, 1.0, waited_s=1.0, peers=peers[0], late={"1": 0.25}), 0.0)
    second = parse_sample(report(0, 4.0, waited_s=3.0, peers=peers[1], late={"1": 1.0}), 3.0)
    assert first is not None and second is not None
    assert waits_between(first, second) == Waits(2.0, {1: 1.0}, {1: 0.75}, {1: (30, 2.0)})
    whole = Waits(3.0, {1: 1.5}, {1: 1.0}, {1: (40, 3.0)})
    assert waits_between(None, second) == whole and totals_of([second]) == {0: whole}
