"""What is made of the times that pairs of ranks have taken."""

from __future__ import annotations

import types

import numpy as np
import pytest

from ringcomm.collective import measure
from ringcomm.collective.measure import _LinkTimer


@pytest.fixture
def timer(monkeypatch):
    """Rank 0's timer; ``times`` gives what each exchange takes, by its length in bytes."""
    made = _LinkTimer(types.SimpleNamespace(rank=0))
    made.lengths = []

    def timed(steps, length):
        made.lengths.append(length)
        return made.times(length)

    monkeypatch.setattr(made, "_timed", timed)
    monkeypatch.setattr(made, "_told", lambda centre, others, elapsed_s: elapsed_s)
    return made


def test_the_latency_is_half_of_a_round_trip(timer):
    trips = iter([*[4.0] * (measure._PINGS - 1), 100.0])
    timer.times = lambda length: next(trips)
    assert timer._latency(0, 1) == 2.0


def test_the_speed_is_measured_with_lengths_that_take_long_enough(timer):
    """The first that is long enough in bytes and in seconds is repeated; the quicker one counts."""
    byte_s = measure._ENOUGH_S / measure._STEADY_BYTES / 4
    timer.times = lambda length: byte_s * length
    assert timer._speed(0, 1) == pytest.approx(byte_s)
    *before, last, again = timer.lengths
    assert last == again == min(4 * measure._STEADY_BYTES, measure._LAST_BYTES)
    assert before == [measure._FIRST_BYTES << power for power in range(len(before))]


def test_a_slow_wire_is_measured_once(timer):
    timer.times = lambda length: measure._AT_MOST_S
    assert timer._speed(0, 1) == measure._AT_MOST_S / measure._FIRST_BYTES
    assert timer.lengths == [measure._FIRST_BYTES]


def test_the_speed_with_all_others_at_the_same_time_is_that_of_the_second_exchange(timer):
    took_s = iter([9.0, 3.0])
    timer.times = lambda length: next(took_s)
    assert timer.burst(0, [1, 2], measure._ENOUGH_S) == 3.0 / (2 * measure._FIRST_BYTES)
    assert timer.lengths == [2 * measure._FIRST_BYTES] * 2


@pytest.mark.parametrize(
    ("each_s", "centres"),
    [
        ([1.0, 1.0], []),
        ([1.0, 1.2, 1.4], [0, 1, 2]),
        ([1.0, 1.2, 1.6, 1.4], [0, 1, 3]),
        ([1.6, 1.0, 1.0, 1.0], []),  # the slow one does not take part
        ([1.0] * (measure._MAX_CENTRES + 1), []),
    ],
)
def test_hosts_of_which_three_or_more_are_the_fastest_are_each_measured_with_all_others(
    monkeypatch, each_s, centres
):
    bursts = []

    def burst(centre, others, byte_s):
        bursts.append(centre)
        assert (others, byte_s) == ([rank for rank in centres if rank != centre], 1.0)
        return 0.5 if centre == 0 else 0.1

    monkeypatch.setattr(measure, "gathered", lambda runner, values: np.array(each_s)[:, np.newaxis])
    runner, timer = types.SimpleNamespace(rank=0), types.SimpleNamespace(burst=burst)
    found = measure._measure_centres(runner, timer, range(len(each_s)), each_s[0])
    assert (bursts, found) == (centres, 0.5 if centres else each_s[0])
