"""What a window of steps says about the time of one: totals, exceptions, and changes of speed."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcomm.balance.window import typical_s
from tests.unit.balance.throttled import Throttled


@settings(deadline=None)
@given(
    st.floats(0.1, 1.0), st.floats(0.01, 0.1), st.floats(1.0, 8.0), st.integers(5, 24), st.integers(0, 2**32)
)
def test_a_quota_makes_single_steps_uneven_and_keeps_totals(quota, period_s, periods, count, seed):
    """Within two periods over the whole window; medians are off by up to a period per step."""
    machine, now_s, times = Throttled(quota, period_s, random.Random(seed)), 0.0, []
    for _ in range(count):
        end_s = machine.end_s(now_s, periods * period_s * quota)
        times.append(end_s - now_s)
        now_s = end_s
    assert typical_s(times) == pytest.approx(periods * period_s, abs=2.05 * period_s / count)


def test_steps_of_50_ms_that_take_50_or_150_ms():
    assert typical_s([0.05, 0.15] * 10) == pytest.approx(0.1)
    assert typical_s([0.05, 0.05, 0.15, 0.05, 0.05, 0.15]) == pytest.approx(0.5 / 6)


@pytest.mark.parametrize("place", range(6))
def test_a_step_that_compiles_or_writes_a_checkpoint_is_left_out(place):
    times = [0.1] * 6
    times[place] = 4.0
    assert typical_s(times) == pytest.approx(0.1)
    assert typical_s([*times, *[0.1] * 14]) == pytest.approx(0.1)


@settings(deadline=None)
@given(st.integers(0, 20), st.floats(0.3, 3.0).filter(lambda factor: abs(factor - 1.0) > 0.2), st.randoms())
def test_a_window_in_which_a_rank_has_changed_its_speed_is_no_mixture(place, factor, draw):
    times = [draw.uniform(0.98, 1.02) * (1.0 if step < place else factor) for step in range(20)]
    found = typical_s(times)
    assert min(abs(found - 1.0), abs(found / factor - 1.0)) <= 0.15 * max(1.0, factor)
    if 2 <= place <= 16:
        assert found == pytest.approx(fmean(times[place:]))
