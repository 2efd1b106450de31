"""The bucket of tokens, with a clock that only moves when told to."""

from __future__ import annotations

import pytest

from ringcomm.transport.rate_limit import TokenBucket


def test_full_at_first_and_never_fuller(clock):
    allowance = TokenBucket(10.0, 5.0, clock)
    assert allowance.left == 5.0
    clock.now_s += 1000.0
    assert allowance.left == 5.0


def test_what_is_spent_comes_back_with_time(clock):
    allowance = TokenBucket(10.0, 5.0, clock)
    allowance.spend(4)
    assert allowance.left == 1.0
    clock.now_s += 0.25
    assert allowance.left == 3.5
    clock.now_s += 0.25
    assert allowance.left == 5.0


def test_more_may_be_spent_than_there_is(clock):
    allowance = TokenBucket(10.0, 5.0, clock)
    allowance.spend(8)
    assert allowance.left == -3.0
    clock.now_s += 0.3
    assert allowance.left == pytest.approx(0.0)
    clock.now_s += 0.1
    assert allowance.left == pytest.approx(1.0)


def test_debts_have_a_limit(clock):
    """However much was spent, half of the time in which it fills is enough for there to be something."""
    allowance = TokenBucket(10.0, 5.0, clock)
    for _ in range(1000):
        allowance.spend(1)
    assert allowance.left == -5.0
    clock.now_s += 0.6
    assert allowance.left == pytest.approx(1.0)


def test_in_the_long_run_no_more_goes_than_comes(clock):
    """A peer spends whenever there is anything, for 100 s: the first lot, and what came back."""
    allowance, spent = TokenBucket(10.0, 5.0, clock), 0
    for _ in range(10_000):
        while allowance.left > 0:
            allowance.spend(1)
            spent += 1
        clock.now_s += 0.01
    assert 1000 <= spent <= 5 + 1000 + 1


def test_time_that_stands_still_gives_nothing(clock):
    allowance = TokenBucket(10.0, 5.0, clock)
    allowance.spend(5)
    assert [allowance.left for _ in range(3)] == [0.0] * 3
