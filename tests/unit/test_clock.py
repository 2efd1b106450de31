"""Deadlines, with a clock that only moves when told to."""

from __future__ import annotations

import math

import pytest

from ringcomm.clock import Deadline, Polling, StepClock


def test_counts_down_and_expires(clock):
    deadline = Deadline(5.0, clock)
    assert (deadline.remaining_s(), deadline.elapsed_s(), deadline.expired()) == (5.0, 0.0, False)
    clock.now_s += 4.5
    assert (deadline.remaining_s(), deadline.elapsed_s(), deadline.expired()) == (0.5, 4.5, False)
    clock.now_s += 0.5
    assert (deadline.remaining_s(), deadline.expired()) == (0.0, True)


def test_no_polling_for_a_while_after_a_yield_that_took_long(clock):
    took_s = [0.0]

    def give_way():
        clock.now_s += took_s[0]

    def polls():
        return polling.until(clock.now_s, 0.5) > clock.now_s

    polling = Polling(clock, give_way)
    polling.give_way()
    assert polls()
    took_s[0] = 2 * Polling.LOST_S
    pauses = []
    for _ in range(8):
        polling.give_way()
        began_s = clock.now_s
        while not polls():
            clock.now_s += 1e-3
        pauses.append(clock.now_s - began_s)
    assert pauses[0] < 0.05 and pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(Polling.MAX_S, abs=2e-3)
    took_s[0] = 0.0
    for _ in range(Polling.ENOUGH):
        polling.give_way()
    took_s[0] = 2 * Polling.LOST_S
    polling.give_way()
    assert not polls()
    clock.now_s += Polling.FIRST_S + 1e-6
    assert polls()


def test_no_limit_never_passes_and_a_restart_counts_from_now(clock):
    endless, deadline = Deadline(None, clock), Deadline(2.0, clock)
    clock.now_s += 1e9
    assert endless.remaining_s() == math.inf and endless.elapsed_s() == 1e9 and not endless.expired()
    deadline.restart()
    assert (deadline.remaining_s(), deadline.elapsed_s(), deadline.expired()) == (2.0, 0.0, False)


class TestStepClock:
    @pytest.fixture
    def at(self, monkeypatch):
        return lambda seconds: monkeypatch.setattr("time.perf_counter", lambda: seconds)

    def test_steps_are_counted_and_measured(self, at):
        at(10.0)
        steps = StepClock()
        assert (steps.count, steps.step_s, steps.mean_s) == (0, 0.0, 0.0)
        for seconds in (1.0, 2.0, 5.0):
            at(seconds)
            steps.add()
        assert (steps.count, steps.step_s, steps.mean_s) == (3, 3.0, 2.0)

    def test_two_owners_take_the_same_steps(self, at):
        steps = StepClock()
        for seconds in (1.0, 2.0, 3.0):
            for owner, later in (("generator", 0.0), ("discriminator", 0.5)):
                at(seconds + later)
                steps.add(owner)
        assert (steps.count, steps.mean_s, steps.last_s) == (3, 1.0, 3.0)
