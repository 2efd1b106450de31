"""What operations are called in traces, whose clock counts, and when events are sent."""

from __future__ import annotations

import pytest

from ringcomm.engine import observer as observer_module
from ringcomm.engine.observer import Observer, Tracing, label_of
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.signature import Signature


@pytest.mark.parametrize(
    ("kind", "name", "label"),
    [
        (Collective.ALLREDUCE, "loss", "allreduce.loss"),
        (Collective.ALLREDUCE, "", "allreduce.noname.7"),
        (Collective.BROADCAST, "broadcast.parameters.bias", "broadcast.parameters.bias"),
        (Collective.BROADCAST, "broadcaster", "broadcast.broadcaster"),
        (Collective.ALLGATHER, "allreduce.x", "allgather.allreduce.x"),
    ],
)
def test_the_kind_is_said_once(kind: Collective, name: str, label: str) -> None:
    signature = Signature(name, 0, int(kind), int(ReduceOp.SUM), 0, ("float32",), ((3,),))
    assert label_of(signature, 7) == label


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


@pytest.mark.parametrize(("rank", "limit_s"), [(0, 0.05), (1, 0.25)])
def test_events_of_rank_0_wait_for_less_than_50_ms(rank, limit_s):
    """Programs read the file after a collective; the events of other ranks need a message."""
    own, observer = Tracing(lambda *message: None, rank), Observer()
    own.attach(observer, lambda peer, events: None)
    observer.call_made("send")
    own.flush(100.0)
    observer.call_made("send")
    assert 0.0 < own.alarm_s(100.0) <= limit_s
