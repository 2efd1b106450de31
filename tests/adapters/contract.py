"""What the collectives of every adapter return in each way of running them, against NumPy in float64."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import numpy as np

from tests.adapters.jobs import close, everybodys, numbers, same_everywhere
from tests.adapters.signatures import functions_of
from tests.support.errors import raises
from tests.support.options import compare_forms

Mode = Callable[[Callable[..., Any], Sequence[Any]], List[Any]]


def check_collectives(
    hvd: Any, mode: Mode, types: Sequence[str], ragged: bool = True, refused: Any = ValueError
) -> None:
    """Check all of it; ``ragged``: ranks may have other numbers of rows; ``refused``: errors of one rank."""
    check_every_type(hvd, mode, types)
    check_operations_and_shapes(hvd, mode)
    check_a_process_set(hvd, mode, refused)
    if ragged:
        check_rows_that_differ(hvd, mode)


def check_every_type(hvd: Any, mode: Mode, types: Sequence[str]) -> None:
    size, rank = hvd.size(), hvd.rank()
    for salt, dtype in enumerate(types):
        own = [numbers(other, (2 * size, 3), dtype, salt) for other in range(size)]
        reduces = dtype not in ("bool", "complex64")
        rows = slice(2 * rank, 2 * rank + 2)
        wanted = [np.concatenate(own), own[-1], np.concatenate([array[rows] for array in own])]
        if reduces:
            total = np.sum([array.astype(np.float64) for array in own], axis=0)
            wanted += [total, total[rows]]

        def function(x: Any, reduces: bool = reduces) -> List[Any]:
            moved = [hvd.allgather(x), hvd.broadcast(x, size - 1), hvd.alltoall(x)]
            return (
                [*moved, hvd.allreduce(x, op=hvd.Sum), hvd.reducescatter(x, op=hvd.Sum)] if reduces else moved
            )

        for found, right in zip(mode(function, [own[rank]]), wanted):
            assert np.asarray(found).dtype.name == dtype
            assert np.array_equal(found, right.astype(dtype)), (dtype, found, right)


def check_operations_and_shapes(hvd: Any, mode: Mode) -> None:
    of_all = {
        hvd.Average: lambda every: every.mean(0), hvd.Sum: lambda every: every.sum(0),
        hvd.Min: lambda every: every.min(0), hvd.Max: lambda every: every.max(0),
        hvd.Product: lambda every: every.prod(0),
    }  # fmt: skip
    cases = [(op, (3, 5)) for op in of_all] + [(hvd.Average, shape) for shape in ((), (0, 3), (1,))]

    def function(*tensors: Any) -> List[Any]:
        return [hvd.allreduce(tensor, op=op) for tensor, (op, _) in zip(tensors, cases)]

    results = mode(function, [numbers(hvd.rank(), shape, "float32", 40) for _, shape in cases])
    for found, (op, shape) in zip(results, cases):
        close(found, of_all[op](everybodys(shape, "float32", 40)))
    same_everywhere(np.concatenate([np.ravel(found) for found in results]))


def check_a_process_set(hvd: Any, mode: Mode, refused: Any) -> None:
    """Its members reduce and gather among themselves; other ranks get an error at once."""
    if hvd.size() == 1:
        return
    members = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    own = [np.full(1, hvd.rank(), np.float32)]

    def function(x: Any) -> List[Any]:
        total = hvd.allreduce(x, op=hvd.Sum, process_set=members)
        return [total, hvd.allgather(x, process_set=members)]

    if members.included():
        total, gathered = mode(function, own)
        assert total.tolist() == [sum(members.ranks)] and gathered.tolist() == members.ranks
    else:
        raises(refused, lambda: mode(function, own), "member")
    hvd.barrier()
    assert hvd.remove_process_set(members)


def check_rows_that_differ(hvd: Any, mode: Mode) -> None:
    size, rank = hvd.size(), hvd.rank()
    own = [np.full((other + 1, 2), other, np.float32) for other in range(size)]
    splits = [(rank + place) % 3 for place in range(size)]
    counts = [(source + rank) % 3 for source in range(size)]
    sent = np.full((sum(splits), 2), rank, np.float32)
    gathered, rows, received = mode(
        lambda x, y: [hvd.allgather(x), *hvd.alltoall(y, splits)], [own[rank], sent]
    )
    assert np.array_equal(gathered, np.concatenate(own))
    assert np.array_equal(rows, np.concatenate([np.full((n, 2), source) for source, n in enumerate(counts)]))
    assert received.tolist() == counts and received.dtype == np.int32


def check_a_mismatch(hvd: Any, mode: Mode, kind: Any, text: str = "") -> None:
    """Every rank gets an error of this kind, and the next call works."""
    if hvd.size() == 1:
        return
    odd, size = hvd.rank() % 2, hvd.size()
    typed = np.ones(size, np.int32 if odd else np.float32)
    for function, array in (
        (
            lambda x: [hvd.allreduce(x, op=hvd.Sum if odd else hvd.Max, name="operation")],
            np.ones(2, np.float32),
        ),
        (lambda x: [hvd.allreduce(x, name="shape")], np.ones(2 + odd, np.float32)),
        (lambda x: [hvd.reducescatter(x, name="rows")], np.ones(size * (1 + odd), np.float32)),
        (lambda x: [hvd.allgather(x, name="type")], typed),
        (lambda x: [hvd.alltoall(x, name="exchanged")], typed),
        (lambda x: [hvd.broadcast(x, odd, name="root")], np.ones(2, np.float32)),
    ):
        raises(kind, lambda function=function, array=array: mode(function, [array]), text)
        (total,) = mode(lambda x: [hvd.allreduce(x, op=hvd.Sum, name="after")], [np.ones(1, np.float32)])
        assert total.tolist() == [size]


def check_every_form(
    hvd: Any, package: str, make: Callable[[Any], Any], back: Callable[[Any], Any], less: Sequence[str] = ()
) -> None:
    """Check each function with each of its options, called as programs do; ``less``: without these."""
    names = [name for name in functions_of(package) if name not in less]
    ranks = list(range(hvd.size()))
    assert compare_forms(hvd, names, ranks, hvd.rank(), hvd.global_process_set, make, back) > 15


def check_error_feedback(make_step: Callable[[str], Callable[[Any], Any]], rank: int, size: int) -> None:
    """What a codec loses of a gradient is added to the next; ``make_step(codec)`` returns what averages."""
    own = [np.random.default_rng(other).normal(size=(64, 96)).astype(np.float32) for other in range(size)]
    for compression in ("int8", "int4"):
        step, found = make_step(compression), np.zeros_like(own[0])
        for _ in range(20):
            reduced = np.asarray(step(own[rank]))
            same_everywhere(reduced)
            found += reduced
        np.testing.assert_allclose(found / 20, np.mean(own, axis=0), atol=0.05, err_msg=compression)
