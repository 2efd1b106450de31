"""What operations are called in traces, whose clock counts, and when events are sent."""

from __future__ import annotations

import pytest

from ringcomm.engine import observer as observer_module
from ringcomm.engine.observer import Observer, Tracing


@pytest.fixture
def clock(monkeypatch):
    """The time in microseconds, which the test sets."""
    now = {"us": 0.0}
    monkeypatch.setattr(observer_module, "now_us", lambda: now["us"])
    return now


def test_clocks_are_compared_by_the_quickest_answer_from_the_middle_of_its_way(clock):
    observer, sent = Observer(), []
    rank, first = Tracing(lambda *message: None, 1), Tracing(lambda *message: sent.append(message), 0)
    clock["us"] = 1000.0
    (question,) = rank.attach(observer)
    assert first.take(1, question) and sent == [({**question, "there_us": 1000.0}, [1])]
    for now, asked, there in ((1100.0, 1000.0, 5050.0), (2500.0, 2000.0, 9000.0), (2510.0, 2500.0, 6507.0)):
        clock["us"] = now  # a slower answer does not count, a quicker one does
        rank.take(0, {"type": "clock", "sent_us": asked, "there_us": there})
        assert observer.offset_us == (4002.0 if now > 2500.0 else 4000.0)
    observer.call_made("send")
    assert observer.drain()[0][3] == 2510.0 + 4002.0
