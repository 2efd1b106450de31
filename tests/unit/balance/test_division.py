"""Every sample exactly once per epoch, whatever happens to speeds, ranks and positions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcomm.balance.division import SampleDivision
from ringcomm.balance.plan import ShareLimits
from ringcomm.errors import BrokenInvariantError, ConfigError


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


def test_global_batches_do_not_depend_on_ranks_or_shares():
    one, three = SampleDivision(100, 16, 5), SampleDivision(100, 16, 5, 3, [3, 1, 1])
    for epoch in range(2):
        for step in range(one.steps):
            assert one.batch(epoch, step).tolist() == three.batch(epoch, step).tolist()
            parts = [three.take(epoch, step, rank).tolist() for rank in range(3)]
            assert sum(parts, []) == one.batch(epoch, step).tolist()


def test_a_short_last_batch_is_dealt_in_proportion():
    division = SampleDivision(106, 96, 0, 3, [3, 1, 1])
    assert division.shares(0, 0) == (58, 19, 19)
    assert division.shares(0, 1) == (6, 2, 2)
    assert SampleDivision(106, 96, drop_last=True).steps == 1
    assert SampleDivision(97, 96, 0, 3).shares(0, 1) == (1, 0, 0)  # ranks may get none


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
