"""The division of a global batch, the model that it is made from, and every sample once per epoch."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcomm.balance.plan import (
    ComputeTime,
    SampleDivision,
    ShareLimits,
    TimedShare,
    compute_s,
    epoch_order,
    fit,
    plan_shares,
    shorten,
)
from ringcomm.errors import BrokenInvariantError, ConfigError

positive = st.floats(1e-4, 1.0)
speeds = st.lists(st.builds(ComputeTime, st.floats(0.0, 2.0), positive), min_size=1, max_size=6)


class TestPlanShares:
    @settings(deadline=None)
    @given(speeds, st.integers(1, 500), st.integers(1, 16))
    def test_all_samples_are_dealt_in_multiples(self, speeds, total, unit):
        shares = plan_shares(speeds, total, ShareLimits(multiple_of=unit))
        assert sum(shares) == total and min(shares) >= 0
        assert sum(share % unit > 0 for share in shares) <= (total % unit > 0)

    @given(
        st.lists(st.builds(ComputeTime, st.floats(0.0, 3.0), st.floats(0.05, 1.0)), min_size=1, max_size=3),
        st.integers(1, 14),
    )
    @settings(max_examples=60, deadline=None)
    def test_no_division_is_better(self, speeds, total):
        best = min(
            compute_s(speeds, shares)
            for shares in itertools.product(range(total + 1), repeat=len(speeds))
            if sum(shares) == total
        )
        assert compute_s(speeds, plan_shares(speeds, total)) <= best * (1 + 1e-9)

    @settings(deadline=None)
    @given(speeds, st.integers(1, 300), st.data())
    def test_limits_are_respected(self, speeds, total, data):
        size = len(speeds)
        low = data.draw(st.integers(0, total // size))
        highs = data.draw(st.lists(st.integers(low, total) | st.none(), min_size=size, max_size=size))
        limits = ShareLimits(low, highs)
        if sum(total if high is None else high for high in highs) < total:
            with pytest.raises(ConfigError, match="does not fit"):
                plan_shares(speeds, total, limits)
            return
        shares = plan_shares(speeds, total, limits)
        assert sum(shares) == total
        for share, high in zip(shares, highs):
            assert low <= share <= (total if high is None else high)


class TestShorten:
    @settings(deadline=None)
    @given(st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any), st.data())
    def test_in_proportion_within_one_sample(self, shares, data):
        count = data.draw(st.integers(0, sum(shares)))
        parts = shorten(tuple(shares), count)
        assert sum(parts) == count
        for part, share in zip(parts, shares):
            assert abs(part - share * count / sum(shares)) < 1 and part <= share


class TestFit:
    @settings(deadline=None)
    @given(st.floats(0.0, 2.0), positive, st.lists(st.integers(1, 200), min_size=2, max_size=8, unique=True))
    def test_exact_observations(self, fixed_s, sample_s, sizes):
        found = fit([TimedShare(size, fixed_s + sample_s * size) for size in sizes])
        assert found.sample_s == pytest.approx(sample_s, rel=1e-3)
        assert found.fixed_s == pytest.approx(fixed_s, abs=1e-3 * max(1.0, sample_s * max(sizes)))


class TestOrder:
    @settings(deadline=None)
    @given(st.integers(0, 400), st.integers(-5, 2**70), st.integers(0, 50))
    def test_every_index_once(self, count, seed, epoch):
        assert sorted(epoch_order(count, seed, epoch).tolist()) == list(range(count))

    def test_it_is_pinned(self):
        """The same on every machine and version, or ranks would disagree about their shares."""
        assert epoch_order(10, 0, 0).tolist() == PINNED
        assert epoch_order(10, 0, 1).tolist() != PINNED
        assert epoch_order(10, 1, 0).tolist() != PINNED


PINNED = [0, 3, 5, 7, 9, 6, 2, 8, 1, 4]


def weights_for(draw, size):
    return draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any))


@settings(deadline=None)
@given(st.data())
def test_every_index_exactly_once_through_any_history(data):
    """New shares at any step ahead, another number of ranks at any step, a resume from a bare position."""
    count = data.draw(st.integers(1, 120))
    global_batch = data.draw(st.integers(1, 30))
    size = data.draw(st.integers(1, 4))
    seed = data.draw(st.integers(0, 3))
    division = SampleDivision(count, global_batch, seed, size)
    for epoch in range(2):
        seen: Counter = Counter()
        for step in range(division.steps):
            what = data.draw(st.sampled_from(["nothing", "nothing", "change", "resize", "resume"]))
            if what == "change":
                other = SampleDivision(count, global_batch, seed, size, weights_for(data.draw, size))
                lead = data.draw(st.integers(0, 4))
                shares = other.shares(0, 0) if count >= global_batch else other.full_shares(0, 0)
                division.change(division.position(epoch, step) + lead, shares)
            elif what == "resize":
                size = data.draw(st.integers(1, 4))
                division.resize(size)
            elif what == "resume":
                division = SampleDivision(count, global_batch, seed, size)
            expected = min(global_batch, count - step * global_batch)
            assert sum(division.shares(epoch, step)) == expected
            for rank in range(size):
                seen.update(division.take(epoch, step, rank).tolist())
        assert seen == Counter(range(count))


def test_shares_that_have_been_taken_do_not_change():
    division = SampleDivision(100, 10, size=2)
    division.take(0, 4, 0)
    with pytest.raises(BrokenInvariantError, match="share of step 4 already"):
        division.change(4, (9, 1))
    division.change(5, (9, 1))
    assert [division.shares(0, step) for step in (4, 5)] == [(5, 5), (9, 1)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"count": -1}, "count=-1"),
        ({"count": 9.5}, "count=9.5"),
        ({"speeds": ["3", "1"]}, "speeds"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"speeds": [3, 1]}, "has 2 numbers, not one per rank"),
        ({"speeds": "guess"}, "measure"),
        ({"speeds": [0, 0, 0]}, "not all 0"),
        ({"limits": ShareLimits(min_batch=40)}, "at least 40"),
        ({"limits": ShareLimits(0, [3, 3, 3])}, "does not fit"),
    ],
)
def test_what_cannot_be_dealt(arguments, text):
    with pytest.raises(ConfigError, match=text):
        SampleDivision(**{"count": 100, "global_batch": 96, "size": 3, **arguments})
