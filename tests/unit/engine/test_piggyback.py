"""Numbers that are sent with announcements: which may, what comes of it, and when the coordinator uses it."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import numpy as np
import pytest

from ringcomm.engine.coordinator import Coordinator, Tuning
from ringcomm.engine.pending import Pending
from ringcomm.engine.piggyback import PIGGYBACK_BYTES, may_piggyback, pack, settle, unpack
from ringcomm.engine.request import Handle, Request
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_OP, NO_ROOT
from ringcomm.wire.messages import encode, validate
from ringcomm.wire.signature import Signature
from tests.support.reference import all_dtypes, assert_reduced, contributions, ops_for


def request(array: Optional[np.ndarray], kind: Collective = Collective.ALLREDUCE, **changes: Any) -> Request:
    op = int(ReduceOp.SUM) if kind == Collective.ALLREDUCE else NO_OP
    arrays = [] if array is None else [array]
    signature = Signature(
        "a", 0, int(kind), op, NO_ROOT, tuple(x.dtype.name for x in arrays), tuple(x.shape for x in arrays)
    )
    return Request(signature._replace(**changes), arrays, Handle("a"))


def settled(arrays: List[np.ndarray], **changes: Any) -> List[np.ndarray]:
    """Every rank's array afterwards."""
    requests = [request(array.copy(), **changes) for array in arrays]
    packed = {rank: pack(item, rank) for rank, item in enumerate(requests)}
    text = settle(requests[0].signature, range(len(arrays)), packed, {})
    for item in requests:
        unpack(item, text)
    return [item.arrays[0] for item in requests]


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_reductions_of_every_type(dtype, size):
    for op in ops_for(dtype):
        for count in (0, 1, 7):
            arrays = contributions(dtype, size, count)
            results = settled(arrays, op=int(op))
            assert_reduced(results[0], arrays, op)
            assert all(result.tobytes() == results[0].tobytes() for result in results)


def test_what_may_not_be_piggybacked():
    most = PIGGYBACK_BYTES // 8
    assert may_piggyback(request(np.zeros(most)))
    assert not may_piggyback(request(np.zeros(most + 1)))
    assert not may_piggyback(request(np.zeros(2), op=int(ReduceOp.ADASUM)))
    assert not may_piggyback(request(np.zeros(2), Collective.ALLGATHER))
    grouped = request(np.zeros(2))
    grouped.arrays.append(np.zeros(2))
    assert not may_piggyback(grouped)


class Ranks:
    """Two ranks' bookkeeping and the coordinator between them."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(["a", "b"], {0: (0, 1)}.__getitem__, Tuning(1 << 20, 0.0))
        self.pending = [Pending(), Pending()]
        self.requests: List[Any] = [None, None]

    def submit(self, rank: int, value: float, urgent: bool) -> None:
        item = self.requests[rank] = request(np.array([value]))
        item.urgent = urgent
        self.pending[rank].add(item)
        message = self.pending[rank].announce(urgent, rank)
        assert message is not None and encode(validate(message))
        self.coordinator.take(rank, message, 0.0)

    def responses(self) -> Optional[Dict[str, Any]]:
        responses = self.coordinator.decide(0.0)
        if responses is not None:
            validate(responses)
            for pending in self.pending:
                pending.learn(responses["fresh"])
                for run in responses["run"]:
                    pending.take_bucket(run)
                for number, count, text in responses["settled"]:
                    [(_, item)] = pending.take_bucket([[number, count]])
                    unpack(item, text)
        return responses


def test_from_the_second_time_on_if_all_wait():
    ranks = Ranks()
    for time in range(3):
        ranks.submit(1, 5.0, urgent=True)
        assert ranks.responses() is None
        ranks.submit(0, 2.0, urgent=True)
        responses = ranks.responses()
        assert len(responses["run"]) == (1 if time == 0 else 0)
        if time:
            assert [item.arrays[0][0] for item in ranks.requests] == [7.0, 7.0]


@pytest.mark.parametrize("first", [0, 1])
def test_if_one_does_not_wait_it_runs_as_any_other(first):
    ranks = Ranks()
    for urgent in (True, False, True):
        ranks.submit(first, 5.0, urgent)
        ranks.submit(1 - first, 2.0, True)
        responses = ranks.responses()
    assert responses["run"] == []  # all of them waited the last time
    ranks.submit(first, 5.0, False)
    ranks.submit(1 - first, 2.0, True)
    responses = ranks.responses()
    assert len(responses["run"]) == 1 and responses["settled"] == []
