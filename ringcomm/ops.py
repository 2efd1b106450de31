"""What can be computed across ranks: the collectives and the reduction operations."""

from __future__ import annotations

from enum import IntEnum


class ReduceOp(IntEnum):
    """How contributions become one. The numbers are Horovod's, so that scripts may compare them.

    ``AVERAGE`` is the sum divided by the number of ranks. For integers the division happens in
    float64 and truncates toward zero.
    """

    AVERAGE = 0
    SUM = 1
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Collective(IntEnum):
    """The kind of operation, as it stands in every message header."""

    ALLREDUCE = 1
    ALLGATHER = 2
    BROADCAST = 3
    REDUCESCATTER = 4
    ALLTOALL = 5
    BARRIER = 6
    EXCHANGE = 7
    """The small fixed-size exchange that tells ranks each other's row counts."""
    BROADCAST_OBJECT = 8
    ALLGATHER_OBJECT = 9


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
