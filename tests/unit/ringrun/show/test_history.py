"""The counters of ranks: valid samples, rates and curves over time, and which rank the others wait for."""

from __future__ import annotations

import json

import pytest

from ringrun.show.history import (
    MAX_POINTS,
    History,
    Waits,
    parse_sample,
    slowest_rank,
)
from tests.unit.ringrun.show.samples import EQUAL, HOSTS, SLOW_2, report, running


def test_rates_are_those_of_the_last_seconds():
    history = History(0.0)
    for second in range(31):
        steps = second if second <= 20 else 20 + 5 * (second - 20)
        history.take(0, report(0, float(second), steps=steps), float(second))
    rates = history.processes[0].rates
    assert rates is not None and rates.steps == 5.0


def test_the_slow_rank_and_no_slow_rank():
    for found in (SLOW_2.slowest(HOSTS, now=True), SLOW_2.slowest(HOSTS)):
        assert found is not None and found.rank == 2 and found.share == pytest.approx(0.7)
    assert EQUAL.slowest(HOSTS, now=True) is None and EQUAL.slowest(HOSTS) is None
    assert SLOW_2.matrix()[0, 2] == pytest.approx(14.0)


def test_a_long_job_has_few_points_and_the_same_mean():
    history = running(3 * MAX_POINTS, [0.5], {}, steps=3.0)
    points = history.processes[0].points
    assert MAX_POINTS / 2 < len(points) <= MAX_POINTS
    assert all(rates.steps == pytest.approx(3.0, rel=0.02) for _, rates in points)
    times = [at_s for at_s, _ in points]
    assert times[-1] > 2.9 * MAX_POINTS and times == sorted(times)

# ---- samples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -1}, {"steps": None}, {"elapsed_s": -1.0}, {"peers": {"a": [1, 2, 0.0, 0, 0.0]}},
        {"kinds": {"x": 3}}, {"steps": 1 << 70}, {"waited_s": float("nan")},
    ],
)  # fmt: skip
def test_what_is_not_valid_is_left_out(changes):
    good = json.loads(report(0, 1.0))
    assert parse_sample(json.dumps({**good, **changes}).encode(), 0.0) is None

# ---- waiting times ------------------------------------------------------------------------------------


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
        found[rank] = Waits(seconds, delivered)
    return found


def slowest(found, hosts=None):
    item = slowest_rank(found, HOSTS if hosts is None else hosts, PERIOD_S)
    return None if item is None else (item.rank, round(item.share, 2), item.link_mb_per_s)


LINKS = {(0, 1): (50.0, 0.4), (1, 0): (50.0, 0.5), (1, 2): (60.0, 8.0), (2, 1): (60.0, 8.0)}
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


def test_a_slow_link_between_two_hosts_is_a_matter_of_both():
    links = {(0, 1): (60.0, 8.0), (1, 0): (60.0, 8.0)}
    assert slowest(waits([9.0, 9.0], links)) is None
