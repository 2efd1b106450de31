"""The numbers of operations: they stand in headers and in users' scripts, so they never change."""

from __future__ import annotations

import ringcomm
from ringcomm.ops import Collective, ReduceOp


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
    }
