"""What operations are called in traces and reports."""

from __future__ import annotations

import pytest

from ringcomm.engine.observer import Observer, label_of, labels_of
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.signature import Key, Signature


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


SIGNATURE = Signature("loss", 0, int(Collective.ALLREDUCE), int(ReduceOp.SUM), 0, ("float32",), ((3,),))


def phases(observer: Observer) -> list:
    """(label, phase, activity) of all events."""
    return [tuple(event[:3]) for event in observer.drain()]


def test_an_operation_from_its_first_announcement_to_its_end():
    observer, key = Observer(), Key(0, "loss", 0)
    for rank in (1, 0):
        observer.announced(key, rank, SIGNATURE)
    observer.negotiated(key)
    bucket = labels_of([SIGNATURE], [5, 0])
    observer.started(bucket)
    observer.activity(bucket, "MEMCPY_IN_FUSION_BUFFER")
    observer.activity(bucket, "")
    observer.ended(bucket)
    label = "allreduce.loss"
    assert phases(observer) == [
        (label, "B", "NEGOTIATE_ALLREDUCE"), (label, "X", "1"), (label, "X", "0"), (label, "E", ""),
        (label, "B", "ALLREDUCE"), (label, "B", "MEMCPY_IN_FUSION_BUFFER"), (label, "E", ""),
        (label, "E", ""),
    ]  # fmt: skip
    assert not observer.collected


def test_a_call_waits_runs_and_ends():
    observer = Observer()
    observer.call_made("send")
    observer.call_started("send", "SEND")
    observer.call_ended("send")
    expected = [("B", "QUEUE"), ("E", ""), ("B", "SEND"), ("E", "")]
    assert phases(observer) == [("send", *event) for event in expected]


def test_at_the_end_what_is_open_ends_once():
    observer = Observer()
    observer.announced(Key(0, "loss", 0), 0, SIGNATURE)
    observer.drain()
    for _ in range(2):
        observer.finish()
    observer.negotiated(Key(0, "other", 0))  # not announced while it observed
    assert phases(observer) == [("allreduce.loss", "E", "")]


def test_times_are_on_the_clock_of_rank_0_and_each_event_is_told():
    observer, told = Observer(), []
    observer.on_added = lambda: told.append(observer.collected)
    observer.call_made("send")
    here = Observer()
    here.call_made("send")
    observer.offset_us = 1e12
    assert told == [True]
    assert observer.drain()[0][3] > 1e12 > here.drain()[0][3]
