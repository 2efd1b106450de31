"""Heartbeats: which peers sent none for too long, and whose heartbeats were only not read yet."""

from __future__ import annotations

from ringcomm.engine.failure_detector import BEATS, FailureDetector


def test_silence_means_death_after_the_limit():
    life = FailureDetector([1, 2], 30.0, 0.0)
    for second in range(1, 30):
        life.received(2, second)
        assert life.silent(float(second)) is None
    assert life.silent(30.0) == (1, 30.0)


def test_heartbeats_are_frequent_enough():
    life = FailureDetector([1], 30.0, 0.0)
    assert [second for second in range(1, 21) if life.due(float(second))] == [5, 10, 15, 20]
    assert life.interval_s == 30.0 / BEATS and 0.0 < life.alarm_s(21.0) <= 4.0


def test_a_rank_that_was_frozen_itself_does_not_blame_others():
    life = FailureDetector([1], 30.0, 0.0)
    assert life.silent(5.0) is None
    assert life.silent(100.0) is None  # this process did not run for 95 s
    for second in range(101, 130):
        assert life.silent(float(second)) is None
    assert life.silent(130.0) == (1, 30.0)


def test_no_heartbeat_is_expected_of_a_rank_that_has_left():
    life = FailureDetector([1], 30.0, 0.0)
    life.left(1)
    life.received(1, 1.0)
    for second in range(1, 100, 5):
        assert life.silent(float(second)) is None


def test_never():
    life = FailureDetector([1], 0.0, 0.0)
    assert not life.due(1e6) and life.silent(1e6) is None and life.alarm_s(1e6) > 1000
