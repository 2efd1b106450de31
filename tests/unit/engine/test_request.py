"""What a rank has submitted: announced once, by number when it has one, and taken by key."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest

from ringcomm.engine.process_sets import ProcessSets
from ringcomm.engine.request import (
    PIGGYBACK_BYTES,
    Handle,
    Pending,
    Request,
    may_piggyback,
    pack,
    settle,
    unpack,
)  # fmt: skip
from ringcomm.errors import ConfigError, DuplicateNameError, MismatchError
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_OP, NO_ROOT
from ringcomm.wire.signature import Signature
from tests.support.reference import all_dtypes, assert_reduced, contributions, ops_for
from tests.unit.engine.coordinated import sig


def request(name: str = "", site: str = "train.py:1") -> Request:
    return Request(sig(name), [np.zeros(4, np.float32)], Handle(name), site=site)


def test_announced_in_full_and_then_by_number():
    pending = Pending()
    first = request("a")
    pending.add(first)
    operations = [[first.signature.to_json(), 0, 1]]
    assert pending.announce(True, 0) == {
        "type": "ready", "operations": operations, "sites": ["train.py:1"], "urgent": True
    }
    assert pending.announce(True, 0) is None
    pending.learn([[7, first.signature.to_json()]])
    assert pending.take_bucket([[7, 0]]) == [(first.signature, first)]
    assert not pending.requests
    pending.add(request("a"))
    announced = pending.announce(False, 0)
    assert announced is not None and announced["operations"] == [[7, 0, 1]] and announced["sites"] == []


def test_messages_with_one_name_are_announced_one_after_another():
    pending = Pending()
    signature = Signature("message", -2, int(Collective.BROADCAST), -1, 0, ("float32",), ((4,),))
    messages = [Request(signature, [np.zeros(4, np.float32)], Handle("")) for _ in range(3)]
    for message in messages:
        pending.add(message)
    for message in messages:
        assert pending.waiting()[0] is message
        announced = pending.announce(True, 0)
        assert announced is not None and len(announced["operations"]) == 1
        assert pending.take(message.key) is message
    assert not pending.unannounced and pending.take(signature.key()) is None
    for message in messages:
        pending.add(message)
    assert pending.take_all() == messages and pending.waiting() == []


def test_a_name_can_be_used_again_when_it_is_done():
    pending = Pending()
    first = request("a", "train.py:3")
    pending.add(first)
    with pytest.raises(DuplicateNameError, match=r"same name .*train\.py:3"):
        pending.add(request("a"))
    assert pending.take(first.key) is first
    pending.add(request("a"))


class TestHandle:
    def test_every_waiter_gets_an_error_of_its_own(self):
        handle = Handle("x")
        handle.finish(error=MismatchError("differ", rank=0, peer=1))
        errors = []
        for _ in range(2):
            with pytest.raises(MismatchError, match="differ") as caught:
                handle.wait()
            errors.append(caught.value)
        assert errors[0] is not errors[1] and errors[1].peer == 1


class TestProcessSets:
    def test_a_change_is_a_name_that_can_be_read(self):
        sets = ProcessSets(0, 4)
        change = ProcessSets.change("add", (0, 2))
        assert change == "add ranks 0, 2"  # messages show it
        assert sets.apply(change) == 1 and sets.members(1) == (0, 2)
        assert sets.apply(ProcessSets.change("remove", (0, 2))) == 1 and sets.numbers() == [0]

    @pytest.mark.parametrize("ranks", [[], [0, 0], [4], [-1], [3, 2, 1, 0]])
    def test_what_cannot_be_a_set(self, ranks):
        why = "use global_process_set" if len(ranks) == 4 else "different ranks"
        with pytest.raises(ConfigError, match=why):
            ProcessSets(0, 4).check_new(ranks)

    def test_a_pair_of_ranks_has_a_number_that_all_ranks_compute(self):
        size = 4
        for one in range(size):
            for other in set(range(size)) - {one}:
                number = ProcessSets(one, size).pair(other)
                assert number < 0 and number == ProcessSets(other, size).pair(one)
                assert ProcessSets(2, size).members(number) == tuple(sorted((one, other)))


def small(array: np.ndarray, kind: Collective = Collective.ALLREDUCE, **changes: Any) -> Request:
    op = int(ReduceOp.SUM) if kind == Collective.ALLREDUCE else NO_OP
    signature = Signature("a", 0, int(kind), op, NO_ROOT, (array.dtype.name,), (array.shape,))
    return Request(signature._replace(**changes), [array], Handle("a"))


def settled(arrays: List[np.ndarray], **changes: Any) -> List[np.ndarray]:
    """Every rank's array afterwards."""
    requests = [small(array.copy(), **changes) for array in arrays]
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
    assert may_piggyback(small(np.zeros(most)))
    assert not may_piggyback(small(np.zeros(most + 1)))
    assert not may_piggyback(small(np.zeros(2), op=int(ReduceOp.ADASUM)))
    assert not may_piggyback(small(np.zeros(2), Collective.ALLGATHER))
    grouped = small(np.zeros(2))
    grouped.arrays.append(np.zeros(2))
    assert not may_piggyback(grouped)
