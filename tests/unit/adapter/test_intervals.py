"""How the ranks' distance and the cost of exchanges set the number of local steps."""

from __future__ import annotations

import math
from typing import List

import pytest

from ringcomm._adapter.local_sgd import Facts, Interval


def run(interval: Interval, drifts: List[float], cost: float = 100.0) -> List[int]:
    """The lengths of the intervals, if ranks are so far apart after each; a step takes 1 s."""
    found = []
    for drift in drifts:
        found.append(interval.steps)
        sent = Facts(*interval.send(0.0, interval.steps))
        interval.learn(sent._replace(exchange_s=cost, step_s=1.0))
        interval.measured(drift**2 * 25.0, 25.0)
        interval.begin()
    return found


def test_every_step_at_first_then_as_the_distance_permits():
    interval = Interval("auto", 0, 3, 1)
    assert run(interval, [0.1, 0.05, 0.01, 0.005, 0.002, 0.002, 0.002]) == [1, 1, 1, 1, 1, 2, 4]
    assert interval.drift == pytest.approx(0.002)


def test_a_distance_that_is_too_large_shortens_the_interval_at_once():
    interval = Interval("auto", 0, 3, 1)
    lengths = run(interval, [0.0] * 6 + [0.04, 0.001, 0.001])
    assert lengths == [1, 1, 2, 4, 8, 16, 32, 64, 8]  # 32 * 0.01 / 0.04


def test_no_longer_than_the_link_needs():
    """An exchange that takes half a step need not be rarer than every fifth step, for 10 % of the time."""
    assert run(Interval("auto", 0, 3, 1), [0.0] * 6, cost=0.5) == [1, 1, 2, 4, 5, 5]
    assert run(Interval("auto", 0, 3, 1), [0.0] * 6, cost=0.01) == [1] * 6


def test_an_exchange_before_its_time_counts_with_the_steps_that_were_made():
    """The program synchronizes after 2 of 16 steps: ranks 0.004 apart then are too far apart after 16."""
    interval = Interval("auto", 0, 2, 1)
    run(interval, [0.0] * 5)
    assert interval.steps == 16
    for made in (2, 0, 0):
        sent = Facts(*interval.send(0.0, made))
        interval.learn(sent._replace(exchange_s=100.0, step_s=1.0))
        interval.measured(0.004**2 * 25.0 if made else 0.0, 25.0)
        interval.begin()
        lengths = interval.steps
    assert lengths == 5, "2 * 0.01 / 0.004; an exchange without local steps changes nothing"


def test_a_restart_and_a_checkpoint():
    interval = Interval("auto", 0, 2, 1)
    run(interval, [0.0] * 5)
    state = interval.state_dict()
    again = Interval("auto", 1, 2, 1)
    again.load_state_dict(state)
    assert again.steps == interval.steps == 16 and math.isnan(again.drift)
    interval.restart()
    assert interval.steps == 1 and run(interval, [0.0] * 3) == [1, 1, 2]


def test_while_the_interval_is_one_step_gradients_are_averaged_except_in_probes():
    interval = Interval("auto", 0, 2, 1)
    kinds = []
    for drift in [0.02] * 20 + [0.001] * 20:
        shared = interval.shares_gradients()
        assert interval.averages_state() == (interval.steps <= 2)
        kinds.append("g" if shared else str(interval.steps))
        sent = Facts(*interval.send(0.0, interval.steps, weights=not shared))
        interval.learn(sent._replace(exchange_s=100.0, step_s=1.0))
        if not shared:
            interval.measured(drift**2 * 25.0, 25.0)
        interval.begin()
    assert "".join(kinds[:25]) == "ggggggg1" + 15 * "g" + "1g", "twice too far: half as often"
    assert kinds[25:30] == ["2", "2", "4", "8", "16"]


def test_a_fixed_interval_stays_and_is_warned_of_once():
    interval = Interval(16, 0, 2, 1)
    texts = []
    for drift in (0.1, 0.4, 0.5):
        interval.send(0.0, interval.steps)
        texts.append(interval.learn([drift**2, 1.0, 16.0, 1.0, 1.0]))
        interval.begin()
    assert texts[0] == texts[2] == "" and interval.steps == 16
    assert "after 16 local steps the ranks' weights were 0.4 of their norm apart" in texts[1]
