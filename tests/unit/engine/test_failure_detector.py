"""Signs of life: who is silent for too long, and who was merely not listened to."""

from __future__ import annotations

from ringcomm.engine.failure_detector import BEATS, Liveness


def test_silence_means_death_after_the_limit():
    life = Liveness([1, 2], 30.0, 0.0)
    for second in range(1, 30):
        life.received(2, second)
        assert life.silent(float(second)) is None
    assert life.silent(30.0) == (1, 30.0)


def test_speaks_often_enough():
    life = Liveness([1], 30.0, 0.0)
    assert [second for second in range(1, 21) if life.due(float(second))] == [5, 10, 15, 20]
    assert life.interval_s == 30.0 / BEATS and 0.0 < life.alarm_s(21.0) <= 4.0


def test_who_was_frozen_itself_does_not_blame_others():
    life = Liveness([1], 30.0, 0.0)
    assert life.silent(5.0) is None
    assert life.silent(100.0) is None  # this process did not run for 95 s
    for second in range(101, 130):
        assert life.silent(float(second)) is None
    assert life.silent(130.0) == (1, 30.0)


def test_who_has_left_is_not_expected_to_speak():
    life = Liveness([1], 30.0, 0.0)
    life.left(1)
    life.received(1, 1.0)
    for second in range(1, 100, 5):
        assert life.silent(float(second)) is None


def test_never():
    life = Liveness([1], 0.0, 0.0)
    assert not life.due(1e6) and life.silent(1e6) is None and life.alarm_s(1e6) > 1000
