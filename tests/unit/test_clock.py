"""Deadlines, with a clock that only moves when told to."""

from __future__ import annotations

import math

import pytest

from ringcomm.clock import Deadline


class ManualClock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return ManualClock()


def test_counts_down_and_expires(clock):
    deadline = Deadline(5.0, clock)
    assert (deadline.remaining_s(), deadline.elapsed_s(), deadline.expired()) == (5.0, 0.0, False)
    clock.now_s += 4.5
    assert (deadline.remaining_s(), deadline.elapsed_s(), deadline.expired()) == (0.5, 4.5, False)
    clock.now_s += 0.5
    assert (deadline.remaining_s(), deadline.expired()) == (0.0, True)


def test_remaining_is_never_negative(clock):
    deadline = Deadline(1.0, clock)
    clock.now_s += 1000
    assert deadline.remaining_s() == 0.0


def test_no_limit_never_passes(clock):
    deadline = Deadline(None, clock)
    clock.now_s += 1e9
    assert deadline.remaining_s() == math.inf
    assert deadline.elapsed_s() == 1e9
    assert not deadline.expired()


def test_a_limit_of_nothing_has_passed_at_once(clock):
    assert Deadline(0.0, clock).expired()


def test_restart_counts_from_now(clock):
    deadline = Deadline(2.0, clock)
    clock.now_s += 3.0
    deadline.restart()
    assert (deadline.remaining_s(), deadline.elapsed_s(), deadline.expired()) == (2.0, 0.0, False)


def test_real_clock_is_the_default():
    deadline = Deadline(60.0)
    assert 0 < deadline.remaining_s() <= 60.0
