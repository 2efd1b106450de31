"""What collectives on arrays of devices must do, as checks that run on every rank of a job.

A :class:`Lab` makes arrays of one kind on the device of one rank. Each check is called on all ranks at the
same time, with the rank's context and lab, and raises AssertionError where a number is wrong. The expected
numbers are those of the same call with NumPy arrays, bit by bit::

    def work(context):
        with my_lab(context.rank) as lab:
            for check in CHECKS:
                check(context, lab)

    run_ranks(3, work)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, List, Sequence

import numpy as np

from ringcomm.arrays.operands import Operand, mirrors, submitted
from ringcomm.collective.options import Options
from ringcomm.dtypes import dtype_named
from ringcomm.engine.request import Handle
from ringcomm.job.context import Context
from ringcomm.ops import Adasum, Average, Max, Min, Product, Sum

LONG = 300_000
"""Elements of arrays that take several segments and pieces."""


class Lab(ABC):
    """Makes and reads arrays of one kind."""

    dtypes: Sequence[str] = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")

    @abstractmethod
    def array(self, values: np.ndarray[Any, Any]) -> Any:
        """A new array on the device, in the order of the current stream."""

    @abstractmethod
    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """The elements, as they are when the current stream has come here."""

    @abstractmethod
    def add_slowly(self, array: Any, number: int) -> None:
        """Queue a kernel in the current stream that takes a while and then adds a number to all elements."""

    @abstractmethod
    def strided(self, values: np.ndarray[Any, Any]) -> Any:
        """An array with these elements whose memory is not in C order."""


Check = Callable[[Context, Lab], None]


def same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], what: str) -> None:
    """Raise AssertionError unless both arrays have the same shape, type and bytes."""
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, not {expected.shape}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, not {expected.dtype}"
    differ = np.flatnonzero(
        np.frombuffer(found.tobytes(), np.uint8) != np.frombuffer(expected.tobytes(), np.uint8)
    )
    assert not differ.size, f"{what}: {differ.size} bytes differ, the first is number {differ[0]}"


def numbers(context: Context, *shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Numbers that differ from rank to rank and from element to element."""
    generator = np.random.default_rng((context.rank, *shape))
    element = dtype_named(dtype) if isinstance(dtype, str) else dtype
    made: np.ndarray[Any, Any] = (generator.standard_normal(shape) * 20).astype(element)
    return made


def check_every_op_and_type(context: Context, lab: Lab) -> None:
    """All reductions, with and without a trailing underscore, are what NumPy arrays give."""
    for name in lab.dtypes:
        for op in (Sum, Average, Max, Min, Product):
            values = numbers(context, 7 * context.size + 3, dtype=name)
            expected = context.allreduce(values, op=op)
            same(lab.numpy(context.allreduce(lab.array(values), op=op)), expected, f"{name} {op!r}")
            array = lab.array(values)
            assert context.allreduce_(array, op=op) is array
            same(lab.numpy(array), expected, f"in place, {name} {op!r}")


def check_every_count(context: Context, lab: Lab) -> None:
    """Empty arrays, fewer elements than ranks, and more than a segment."""
    size = context.size
    for count in sorted({0, 1, size - 1, size, size + 1, 5000, LONG + size}):
        values = numbers(context, count)
        expected = context.allreduce(values, op=Sum)
        array = lab.array(values)
        context.allreduce_(array, op=Sum)
        same(lab.numpy(array), expected, f"{count} elements")


def check_scales_weights_and_codecs(context: Context, lab: Lab) -> None:
    """Options of which some are computed on the host before anything is sent."""
    values = numbers(context, LONG)
    for options in (
        {"prescale_factor": 0.5, "postscale_factor": 3.0},
        {"weight": context.rank + 1.0},
        {"compression": "int8"},
        {"op": Adasum},
    ):
        expected = context.allreduce(values, **options)
        same(lab.numpy(context.allreduce(lab.array(values), **options)), expected, str(options))


def check_layouts(context: Context, lab: Lab) -> None:
    """Arrays that are not in C order, of several dimensions and of none."""
    values = numbers(context, 40, 30)
    expected = context.allreduce(values, op=Sum)
    array = lab.strided(values)
    context.allreduce_(array, op=Sum)
    same(lab.numpy(array), expected, "strided, in place")
    same(lab.numpy(context.allreduce(lab.strided(values), op=Sum)), expected, "strided")
    alone = np.asarray(np.float32(context.rank))
    same(lab.numpy(context.allreduce(lab.array(alone), op=Sum)), context.allreduce(alone, op=Sum), "a number")


def check_rows(context: Context, lab: Lab) -> None:
    """Collectives that distribute and collect rows."""
    size, rank = context.size, context.rank
    values = numbers(context, 2 * size + 1, 300)
    same(
        lab.numpy(context.reducescatter(lab.array(values), op=Sum)),
        context.reducescatter(values, op=Sum, prescale_factor=1.0),
        "reducescatter",
    )
    same(
        lab.numpy(context.reducescatter_(lab.array(values), op=Average, prescale_factor=2.0)),
        context.reducescatter(values, op=Average, prescale_factor=2.0),
        "reducescatter_",
    )
    uneven = numbers(context, rank + 1, 20_000)
    same(lab.numpy(context.allgather(lab.array(uneven))), context.allgather(uneven), "allgather")
    same(
        lab.numpy(context.allgather(lab.array(np.float32(rank).reshape(())))),
        context.allgather(np.float32(rank)),
        "allgather of numbers",
    )
    whole = numbers(context, 3 * size + 1, 500)
    own = whole.copy()
    same(lab.numpy(context.allgather_(lab.array(own))), context.allgather_(whole), "allgather_")
    table = numbers(context, 4 * size, 700)
    same(lab.numpy(context.alltoall(lab.array(table))), context.alltoall(table), "alltoall")
    same(lab.numpy(context.alltoall_(lab.array(table))), context.alltoall(table), "alltoall_")
    splits = [index + rank for index in range(size)]
    parts = numbers(context, sum(splits), 9)
    found, received = context.alltoall(lab.array(parts), splits=splits)
    expected, counts = context.alltoall(parts, splits=splits)
    same(lab.numpy(found), expected, "alltoall with splits")
    same(received, counts, "the counts of alltoall")


def check_broadcast(context: Context, lab: Lab) -> None:
    """The root's elements, also if the other ranks hold nothing sensible."""
    for root in range(context.size):
        values = numbers(context, LONG)
        expected = context.broadcast(values, root)
        same(lab.numpy(context.broadcast(lab.array(values), root)), expected, "broadcast")
        same(lab.numpy(context.broadcast_(lab.array(values), root)), expected, "broadcast_")


def check_order_of_the_stream(context: Context, lab: Lab) -> None:
    """What was queued before the call comes before it, and what is queued after it comes after it."""
    values = numbers(context, LONG, dtype=np.float64)
    expected = context.allreduce(values + 1, op=Sum) + 1
    array = lab.array(values)
    lab.add_slowly(array, 1)
    context.allreduce_(array, op=Sum)
    lab.add_slowly(array, 1)
    same(lab.numpy(array), expected, "between two kernels")


def check_input_may_change_at_once(context: Context, lab: Lab) -> None:
    """A call that returns a new array leaves its input as it is, and the caller may overwrite that."""
    values = numbers(context, LONG)
    expected = context.allreduce(values, op=Sum)
    array = lab.array(values)
    result = context.allreduce(array, op=Sum)
    lab.add_slowly(array, 1)
    same(lab.numpy(result), expected, "the result")
    same(lab.numpy(array), values + np.float32(1), "the input")


def check_mixed(context: Context, lab: Lab) -> None:
    """Some ranks pass an array of a device and others one of NumPy."""
    values = numbers(context, LONG)
    expected = context.allreduce(values, op=Sum)
    if context.rank % 2:
        found = context.allreduce(values, op=Sum)
    else:
        found = lab.numpy(context.allreduce(lab.array(values), op=Sum))
    same(found, expected, "mixed")


def check_repeated(context: Context, lab: Lab) -> None:
    """The same call again and again, without a wait in between: blocks are used again in time."""
    values = numbers(context, LONG)
    arrays = [lab.array(values) for _ in range(6)]
    for array in arrays:
        context.allreduce_(array, op=Sum)
    expected = context.allreduce(values, op=Sum)
    for array in arrays:
        same(lab.numpy(array), expected, "repeated")


def check_asynchronous(context: Context, lab: Lab) -> None:
    """Operations by name: fused, alone and grouped; in place and new."""
    pool = context.staging
    for count in (5, 1000, LONG):
        values = numbers(context, count)
        expected = context.allreduce(values, op=Sum)
        arrays = [lab.array(values) for _ in range(3)]
        lab.add_slowly(arrays[0], 0)
        targets = [submitted(pool, array, "in place") for array in arrays[:2]]
        copies = [submitted(pool, arrays[2])]
        handles = [
            _start(context, f"{name}{count}", group)
            for name, group in (("one", targets[:1]), ("two", targets[1:]), ("new", copies))
        ]
        for handle in handles:
            (array,) = handle.wait()
            same(lab.numpy(array), expected, f"asynchronous, {count} elements")


def _start(context: Context, name: str, arguments: Sequence[Operand]) -> Handle:
    return context.engine.allreduce(
        [item.flat for item in arguments], Sum, name, [item.shape for item in arguments],
        convert=lambda _: [item.finish() for item in arguments], mirrors=mirrors(arguments),
    )  # fmt: skip


def check_asynchronous_rows(context: Context, lab: Lab) -> None:
    """Rows and broadcasts by name."""
    engine, pool, size = context.engine, context.staging, context.size
    values = numbers(context, 2 * size, 50)
    rows = submitted(pool, lab.array(values), rows=True)
    found = engine.reducescatter(
        [rows.flat], [rows.shape], Options(Sum, "scatter"), convert=lambda made: rows.deliver(made[0]),
        mirrors=mirrors([rows]),
    ).wait()  # fmt: skip
    same(lab.numpy(found), context.reducescatter(values, op=Sum), "reducescatter")
    more = submitted(pool, lab.array(values), rows=True)
    found = engine.allgather(
        [more.flat], [more.shape], "gather", convert=lambda made: more.deliver(made[0]),
        mirrors=mirrors([more]),
    ).wait()  # fmt: skip
    same(lab.numpy(found), context.allgather(values), "allgather")
    target = submitted(pool, lab.array(values), "broadcast", read=context.rank == size - 1)
    found = engine.broadcast(
        [target.flat], size - 1, "cast", [target.shape], convert=lambda _: target.finish(),
        mirrors=mirrors([target]),
    ).wait()  # fmt: skip
    same(lab.numpy(found), context.broadcast(values, size - 1), "broadcast")
    last = submitted(pool, lab.array(values), rows=True)
    splits = [2] * size
    found, _ = engine.alltoall(
        last.flat, last.shape, splits, "exchange",
        convert=lambda made: (last.deliver(made[0]), made[1]), mirrors=mirrors([last]),
    ).wait()  # fmt: skip
    same(lab.numpy(found), context.alltoall(values), "alltoall")


CHECKS: List[Check] = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
