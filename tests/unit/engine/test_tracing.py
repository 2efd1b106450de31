"""Comparing clocks with rank 0, and bringing events there."""

from __future__ import annotations

import pytest

from ringcomm.engine import tracing
from ringcomm.engine.observer import Observer
from ringcomm.engine.tracing import Tracing


class Outbox:
    """Keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, message, peer=0):
        self.sent.append((peer, message))


@pytest.fixture
def clock(monkeypatch):
    """The time in microseconds, which the test sets."""
    now = {"us": 0.0}
    monkeypatch.setattr(tracing, "now_us", lambda: now["us"])
    return now


def test_the_quickest_answer_is_from_the_middle_of_its_way(clock):
    outbox, observer = Outbox(), Observer()
    rank = Tracing(outbox, 1)
    clock["us"] = 1000.0
    (question,) = rank.attach(observer)
    assert question["sent_us"] == 1000.0
    clock["us"] = 1100.0
    assert rank.take(0, {"type": "clock", "sent_us": 1000.0, "there_us": 5050.0})
    assert observer.offset_us == 4000.0
    # A slower one does not count, a quicker one does.
    clock["us"] = 2500.0
    rank.take(0, {"type": "clock", "sent_us": 2000.0, "there_us": 9000.0})
    assert observer.offset_us == 4000.0
    rank.take(0, {"type": "clock", "sent_us": 2490.0, "there_us": 6497.0})
    assert observer.offset_us == 4002.0


def test_rank_0_answers_with_its_own_time(clock):
    outbox = Outbox()
    first = Tracing(outbox, 0)
    clock["us"] = 77.0
    assert first.attach(Observer()) == []
    assert first.take(2, {"type": "clock", "sent_us": 3.0, "there_us": 0.0})
    assert outbox.sent == [(2, {"type": "clock", "sent_us": 3.0, "there_us": 77.0})]


def test_events_are_taken_by_rank_0_and_others_are_left_alone():
    taken = []
    first = Tracing(Outbox(), 0)
    assert first.take(1, {"type": "trace", "events": [[1]]}), "before a timeline begins they are dropped"
    first.attach(Observer(), lambda peer, events: taken.append((peer, events)))
    assert first.take(1, {"type": "trace", "events": [[2]]})
    assert taken == [(1, [[2]])]
    assert not first.take(1, {"type": "ready"})


@pytest.mark.parametrize(("rank", "limit_s"), [(0, 0.05), (1, 0.25)])
def test_events_of_rank_0_wait_for_less_than_50_ms(rank, limit_s):
    """Programs read the file after a collective; the events of other ranks need a message."""
    own, observer = Tracing(Outbox(), rank), Observer()
    own.attach(observer, lambda peer, events: None)
    observer.call_made("send")
    own.flush(100.0)
    observer.call_made("send")
    assert 0.0 < own.alarm_s(100.0) <= limit_s
