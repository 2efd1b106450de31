"""The numbers of operations: they stand in headers and in users' scripts, so they never change."""

from __future__ import annotations

import pytest

import ringcomm
from ringcomm.ops import Bitwise, Collective, ReduceOp, op_name


def test_reductions_have_horovods_numbers():
    numbers = {"AVERAGE": 0, "SUM": 1, "ADASUM": 2, "MIN": 3, "MAX": 4, "PRODUCT": 5}
    assert {op.name: int(op) for op in ReduceOp} == numbers


def test_names_for_users():
    for op in ReduceOp:
        assert getattr(ringcomm, op.name.capitalize()) is op


def test_collectives_on_the_wire():
    assert {item.name: int(item) for item in Collective} == {
        "ALLREDUCE": 1,
        "ALLGATHER": 2,
        "BROADCAST": 3,
        "REDUCESCATTER": 4,
        "ALLTOALL": 5,
        "BARRIER": 6,
        "EXCHANGE": 7,
        "BROADCAST_OBJECT": 8,
        "ALLGATHER_OBJECT": 9,
        "JOIN": 10,
        "PROCESS_SET": 11,
        "GATHER": 12,
        "SCATTER": 13,
        "REDUCE": 14,
    }


def test_bitwise_reductions_have_numbers_of_their_own():
    assert {item.name: int(item) for item in Bitwise} == {"BAND": 16, "BOR": 17, "BXOR": 18}
    assert not {int(op) for op in ReduceOp} & {int(op) for op in Bitwise}
    assert [op_name(op) for op in (ReduceOp.SUM, ReduceOp.MAX, Bitwise.BXOR)] == ["Sum", "Max", "BXOR"]
    for number in (6, 15, 19, 254):
        with pytest.raises(ValueError):
            op_name(number)
