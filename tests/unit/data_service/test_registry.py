"""The registry of the data service: every message, and what is sent in reply."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest

from ringcomm.data_service.registry import Registry
from ringcomm.errors import ProtocolError
from ringcomm.rendezvous.actions import Timer
from ringcomm.wire.messages import validate

Sent = List[Tuple[int, Dict[str, Any]]]


def receive(registry: Registry, connection: int, kind: str, **fields: Any) -> Sent:
    told = registry.received(connection, validate({"type": kind, **fields}))
    return [(action.connection, validate(action.message)) for action in told]


def progress(address: str, *missing: int) -> Dict[str, Any]:
    return {"type": "standing", "address": address, "missing": list(missing)}


NOTED, OVER = {"type": "noted"}, {"type": "over", "reason": ""}


def test_watchers_get_the_progress_at_once_and_at_every_change() -> None:
    registry = Registry(2, 2, 60.0)
    assert receive(registry, 1, "watch", dispatcher=1) == [(1, progress("", 2, 3))]
    assert receive(registry, 2, "dispatcher", number=0, address="a:1") == [(2, NOTED)]
    told = receive(registry, 2, "dispatcher", number=1, address="b:1")
    assert told == [(2, NOTED), (1, progress("b:1", 2, 3))]
    assert receive(registry, 3, "worker", dispatcher=1, number=3) == [(3, NOTED), (1, progress("b:1", 2))]
    assert receive(registry, 4, "watch", dispatcher=0) == [(4, progress("a:1", 0, 1))]
    assert registry.lost(1, 0.0) == []
    assert receive(registry, 3, "worker", dispatcher=1, number=2) == [(3, NOTED)]
    assert receive(registry, 1, "watch", dispatcher=1) == [(1, progress("b:1"))]


def test_the_end_is_sent_to_all_that_attend_now_or_later() -> None:
    registry = Registry(1, 1, 60.0)
    assert receive(registry, 1, "attend") == receive(registry, 2, "attend") == []
    assert registry.lost(2, 0.0) == []
    assert receive(registry, 3, "finish") == [(3, NOTED), (1, OVER)]
    assert registry.over
    assert receive(registry, 4, "attend") == [(4, OVER)]
    ((connection, answer),) = receive(registry, 4, "watch", dispatcher=0)
    assert connection == 4
    assert "training has ended" in answer["reason"]


def test_when_all_trainers_are_gone_it_is_over_after_a_while() -> None:
    registry = Registry(1, 1, 60.0)
    assert receive(registry, 1, "attend") == []
    assert receive(registry, 2, "train") == [(2, NOTED)]
    assert receive(registry, 3, "train") == [(3, NOTED)]
    assert registry.lost(2, 5.0) == []
    assert registry.lost(3, 10.0) == [Timer(60.0)]
    assert registry.tick(69.0) == []
    (told,) = registry.tick(70.0)
    assert told.connection == 1
    assert "hung up 60 s ago without saying that training is over" in validate(told.message)["reason"]
    assert registry.over and registry.tick(80.0) == []
    assert receive(registry, 4, "attend") == [(4, told.message)]
    ((_, answer),) = receive(registry, 5, "train")
    assert answer["type"] == "denied"


def test_another_may_come_in_time_and_the_one_that_finished_may_go() -> None:
    registry = Registry(1, 1, 60.0)
    receive(registry, 1, "attend")
    receive(registry, 2, "train")
    assert registry.lost(2, 0.0) == [Timer(60.0)]
    assert receive(registry, 3, "train") == [(3, NOTED)]
    assert registry.tick(60.0) == registry.tick(1e9) == []
    assert registry.lost(3, 100.0) == [Timer(60.0)]
    assert registry.tick(110.0) == []
    receive(registry, 4, "train")
    assert receive(registry, 4, "finish") == [(4, NOTED), (1, OVER)]
    assert registry.lost(4, 120.0) == []
    assert registry.tick(1e9) == []


def test_before_the_first_trainer_there_is_no_limit() -> None:
    registry = Registry(1, 1, 60.0)
    receive(registry, 1, "attend")
    receive(registry, 2, "watch", dispatcher=0)
    assert registry.lost(2, 0.0) == [] and registry.tick(1e9) == []


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("watch", {"dispatcher": 2}, "there is no dispatcher 2: there are 2"),
        ("watch", {"dispatcher": -1}, "there is no dispatcher -1"),
        ("worker", {"dispatcher": 0, "number": 3}, "worker 3 is not one of dispatcher 0's: 0 to 2"),
        ("dispatcher", {"number": 1, "address": "other:1"}, "already, at here:1 and not at other:1"),
        ("dispatcher", {"number": 0, "address": ""}, "needs an address"),
        ("dispatcher", {"number": 0, "address": "x" * 1000}, "at most 300 bytes"),
    ],
)
def test_what_makes_no_sense_is_denied(kind: str, fields: Dict[str, Any], reason: str) -> None:
    registry = Registry(2, 3, 60.0)
    receive(registry, 1, "dispatcher", number=1, address="here:1")
    assert receive(registry, 1, "dispatcher", number=1, address="here:1") == [(1, NOTED)]
    ((connection, answer),) = receive(registry, 5, kind, **fields)
    assert (connection, answer["type"]) == (5, "denied")
    assert reason in answer["reason"]


def test_other_messages_end_the_connection() -> None:
    with pytest.raises(ProtocolError, match="takes no 'ping'"):
        receive(Registry(1, 1, 60.0), 1, "ping")
