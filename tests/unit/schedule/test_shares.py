"""Shares against the bound, and against every other way to share."""

from __future__ import annotations

import random

import pytest

from ringcomm.schedule.shares import even_classes, interface_shares, share_bounds
from ringcomm.schedule.steps import even_bounds


def time_of(ranks, speeds, shares):
    """What the slowest interface takes, in vectors per unit of speed."""
    total = sum(ranks)
    return max((m + f * (total - 2 * m)) / b for m, b, f in zip(ranks, speeds, shares))


def bound(speeds):
    return max(1 / min(speeds), 2 * (len(speeds) - 1) / sum(speeds))


@pytest.mark.parametrize(
    "speeds",
    [[1, 1, 1], [1, 10, 10, 10], [2, 2, 2, 100], [3, 5, 9], [1, 7], [1], [5, 4, 3, 2, 1, 9], [1] * 40],
)  # fmt: skip
def test_one_rank_per_interface_reaches_the_bound(speeds):
    shares = interface_shares([1] * len(speeds), [float(speed) for speed in speeds])
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0
    if len(speeds) > 1:
        assert time_of([1] * len(speeds), speeds, shares) == pytest.approx(bound(speeds))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_shares_are_better(seed):
    dice = random.Random(seed)
    ranks = [dice.randint(1, 5) for _ in range(dice.randint(2, 5))]
    speeds = [dice.choice([0.1, 1.0, 2.5, 10.0]) for _ in ranks]
    best = time_of(ranks, speeds, interface_shares(ranks, speeds))
    for _ in range(500):
        parts = [dice.random() ** 4 for _ in ranks]
        assert time_of(ranks, speeds, [part / sum(parts) for part in parts]) >= best * (1 - 1e-9)


def test_equal_interfaces_get_equal_shares_for_all_ranks():
    assert interface_shares([1] * 5, [3.0] * 5) == pytest.approx([0.2] * 5)
    assert interface_shares([2, 2, 2], [1.0] * 3) == pytest.approx([1 / 3] * 3)
    assert interface_shares([4, 4], [1.0, 10.0]) == pytest.approx([0.5, 0.5])


def test_bounds():
    assert share_bounds(0, [0.5, 0.5]) == (0, 0, 0)
    assert share_bounds(12, [0.25] * 4) == even_bounds(12, 4)
    assert share_bounds(7, [0.0, 1.0, 0.0]) == (0, 0, 7, 7)
    for count in (1, 5, 1000):
        bounds = share_bounds(count, interface_shares([1, 1, 1], [3.0, 5.0, 9.0]))
        assert bounds[0] == 0 and bounds[-1] == count and list(bounds) == sorted(bounds)


def test_classes_leave_the_order_and_what_differs():
    assert even_classes([1.0]) == (1.0,)
    assert even_classes([940.0, 955.0, 930.0]) == (pytest.approx(941.67, abs=0.01),) * 3
    slow, fast, other = even_classes([95.0, 900.0, 950.0])
    assert slow == 95.0 and fast == other == 925.0
