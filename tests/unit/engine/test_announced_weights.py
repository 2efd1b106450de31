"""Weights from announcements to responses: pure state machines, no threads, no links."""

from __future__ import annotations

from typing import Any, Dict, Sequence

import numpy as np

from ringcomm.collective.weighted import Total
from ringcomm.engine.announcements import totals_of
from ringcomm.engine.coordinator import Coordinator, Tuning
from ringcomm.engine.pending import Pending
from ringcomm.engine.request import Handle, Request
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_ROOT
from ringcomm.wire.messages import encode, validate
from ringcomm.wire.signature import Signature

HOSTS = ["desk", "jetson1", "jetson2"]


def signature(name: str, weighted: bool = True) -> Signature:
    kind, op = int(Collective.ALLREDUCE), int(ReduceOp.AVERAGE)
    return Signature(name, 0, kind, op, NO_ROOT, ("float32",), ((4,),), weighted=weighted)


def announcement(weights: Sequence[Any], *signatures: Signature) -> Dict[str, Any]:
    pending = Pending()
    for item, weight in zip(signatures, weights):
        pending.add(Request(item, [np.zeros(4, np.float32)], Handle(item.name), weight=weight))
    message = pending.announce(False, 0)
    assert message is not None
    return message


def coordinator() -> Coordinator:
    return Coordinator(HOSTS, {0: (0, 1, 2)}.__getitem__, Tuning(1 << 20, 0.0))


def test_the_sums_go_to_every_rank_with_the_buckets():
    deciding = coordinator()
    for rank, weight in enumerate((0.1, 0.2, 0.3)):
        items = signature("plain", False), signature("a"), signature("b")
        deciding.take(rank, validate(announcement([1.0, weight, 10.0 + rank], *items)), 100.0)
    response = deciding.decide(100.0)
    assert response is not None and encode(response)
    assert [len(bucket) for bucket in response["run"]] == [2, 4]  # plain averages are not fused with them
    assert response["totals"] == [Total.of([0.1, 0.2, 0.3]), Total.of([10.0, 11.0, 12.0])]
    pending = Pending()
    pending.learn(response["fresh"])
    request = Request(signature("b"), [np.zeros(4, np.float32)], Handle("b"), weight=11.0)
    pending.add(request)
    totals = totals_of(response["totals"])
    for bucket in response["run"]:
        pending.take_bucket(bucket, totals)
    assert request.total.share(request.weight, 3) == 1.0


def test_known_short_and_new_operations_keep_their_weights():
    pending = Pending()
    items = {name: signature(name) for name in ("known", "short", "new", "known too")}
    for number, name in enumerate(("known", "short", "known too")):
        pending.learn([[number, items[name].to_json()]])
    for weight, name in enumerate(("new", "short", "known", "known too")):
        request = Request(items[name], [np.zeros(4, np.float32)], Handle(name), weight=float(weight))
        request.urgent = name == "short"
        pending.add(request)
    message = pending.announce(True, 0)
    assert message is not None
    assert message["weights"] == [2.0, 3.0, 1.0, 0.0]  # known ones, short ones, new ones


def test_a_rank_that_has_joined_has_none():
    deciding = coordinator()
    deciding.take(2, {"type": "joined"}, 100.0)
    for rank in (0, 1):
        deciding.take(rank, announcement([float(rank)], signature("w")), 100.0)
    response = deciding.decide(100.0)
    assert response is not None and response["totals"] == [Total.of([1.0])]


def test_no_weight_at_all():
    deciding = coordinator()
    for rank in range(3):
        deciding.take(rank, announcement([0.0], signature("w")), 100.0)
    response = deciding.decide(100.0)
    assert response is not None and response["run"] == []
    assert "weights of all ranks are 0" in response["failed"][0][2]
