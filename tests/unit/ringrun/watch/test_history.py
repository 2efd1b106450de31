"""Samples over time: present rates, curves that stay short, processes that come and go."""

from __future__ import annotations

import pytest

from ringrun.watch.history import MAX_POINTS, WINDOW_S, History
from tests.unit.ringrun.watch.samples import EQUAL, HOSTS, SLOW_2, report, running


def test_rates_are_those_of_the_last_seconds():
    history = History(0.0)
    for second in range(31):
        steps = second if second <= 20 else 20 + 5 * (second - 20)
        history.take(0, report(0, float(second), steps=steps), float(second))
    rates = history.processes[0].rates
    assert rates is not None and rates.period_s == WINDOW_S and rates.steps == 5.0


def test_the_slow_rank_and_no_slow_rank():
    for found in (SLOW_2.slowest_now(HOSTS), SLOW_2.slowest(HOSTS)):
        assert found is not None and found.rank == 2 and found.share == pytest.approx(0.7)
    assert EQUAL.slowest_now(HOSTS) is None and EQUAL.slowest(HOSTS) is None
    assert SLOW_2.matrix()[0, 2] == pytest.approx(14.0)


def test_a_long_job_has_few_points_and_the_same_mean():
    history = running(3 * MAX_POINTS, [0.5], {}, steps=3.0)
    points = history.processes[0].points
    assert MAX_POINTS / 2 < len(points) <= MAX_POINTS
    assert all(point.rates.steps == pytest.approx(3.0, rel=0.02) for point in points)
    covered = sum(point.rates.period_s for point in running(MAX_POINTS + 2, [0.5], {}).processes[0].points)
    assert covered == MAX_POINTS + 2, "thinning leaves no second out"
    times = [point.at_s for point in points]
    assert times[-1] > 2.9 * MAX_POINTS and times == sorted(times)


def test_the_last_report_of_a_job_makes_no_peak():
    history = running(3, [0.5, 0.5], {})
    late = {"1": [9_000_000, 0, 0.0, 0, 0.0]}
    history.take(0, report(0, 3.1, steps=60, peers=late), 3.1)
    process = history.processes[0]
    assert len(process.points) == 3 and process.peak_bytes[1] == 1e6
    assert process.latest is not None and process.latest.steps == 60


def test_another_epoch_begins_anew():
    """Member 1 is lost, member 2 takes its rank."""
    history = running(5, [0.5, 0.5], {})
    history.changed([0, 2])
    history.take(0, report(0, 1.0, generation=1), 7.0)
    history.take(2, report(1, 1.0, generation=1), 7.0)
    assert history.present() == {0: 0, 1: 2}
    assert history.processes[0].rates is None
    assert [number for number, _ in history.samples()] == [0, 2, 1]


def test_the_interfaces_of_a_link_are_known_from_both_ends():
    history = History(0.0)
    row = {"rank": 0, "peer": 2, "iface": "eth0", "peer_iface": "enp3s0"}
    history.linked([row, {**row, "rank": 1}])
    assert history.interfaces[0, 2] == "eth0" and history.interfaces[2, 0] == "enp3s0"
    history.linked([])  # an epoch of which nothing is known
    assert set(history.interfaces) == {(0, 2), (2, 0), (1, 2), (2, 1)}
    history.linked([row])
    assert set(history.interfaces) == {(0, 2), (2, 0)}
