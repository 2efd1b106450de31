"""What every rank checks about the collectives of ringcomm.mxnet, against NumPy in float64."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Iterator, List, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError

import ringcomm.mxnet as hvd
from ringcomm.mxnet import arrays
from tests.adapters.jobs import close, numbers, same_everywhere
from tests.adapters.signatures import functions_of
from tests.support.errors import raises
from tests.support.options import compare_forms

TYPES = ["float16", "float32", "float64", "uint8", "int8", "int32", "int64"]
SHAPES: List[Tuple[int, ...]] = [(), (1,), (0, 3), (7,), (3, 5), (2, 3, 4)]
OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]


def context() -> mx.Context:
    """Horovod's users give every rank a context of its own."""
    return mx.cpu(hvd.rank())


def ndarray(array: Any) -> mx.nd.NDArray:
    with mx.util.np_shape(True):  # without it MXNet has neither scalars nor empty arrays
        return mx.nd.array(array, dtype=array.dtype, ctx=context())


def reduced(op: Any, contributions: Any) -> Any:
    if op == hvd.Average:
        return contributions.sum(0) / len(contributions)
    names = {hvd.Sum: "sum", hvd.Product: "prod", hvd.Min: "min", hvd.Max: "max"}
    return getattr(contributions, names[op])(0)


def process_sets() -> Iterator[Tuple[Any, List[int]]]:
    """All ranks, then this rank's half of them, as Horovod's tests have it."""
    all_ranks = list(range(hvd.size()))
    yield hvd.global_process_set, all_ranks
    if hvd.size() == 1:
        return
    even, odd = hvd.add_process_set(all_ranks[::2]), hvd.add_process_set(all_ranks[1::2])
    mine = even if hvd.rank() % 2 == 0 else odd
    yield mine, mine.ranks
    assert hvd.remove_process_set(odd) and hvd.remove_process_set(even)


def check_every_reduction() -> None:
    cases = [(hvd.Sum, dtype, (3, 5)) for dtype in TYPES] + [(op, "float32", (3, 5)) for op in OPS]
    cases += [(hvd.Average, "float32", shape) for shape in SHAPES]
    for members, ranks in process_sets():
        results = []
        for salt, (op, dtype, shape) in enumerate(cases):
            mine = ndarray(numbers(hvd.rank(), shape, dtype, salt))
            before = mine.asnumpy()
            result = hvd.allreduce(mine, op=op, process_set=members)
            close(result.asnumpy(), reduced(op, stacked(ranks, shape, dtype, salt)))
            assert result.context == mine.context and (mine.asnumpy() == before).all()
            assert hvd.allreduce_(mine, op=op, process_set=members) is mine
            assert mine.asnumpy().tobytes() == result.asnumpy().tobytes()
            results.append(result.asnumpy().tobytes())
        gathered = hvd.allgather_object(b"".join(results), process_set=members)
        assert all(item == gathered[0] for item in gathered)


def stacked(ranks: List[int], shape: Tuple[int, ...], dtype: str, salt: int) -> Any:
    return np.stack([numbers(rank, shape, dtype, salt).astype(np.float64) for rank in ranks])


def check_groups_scales_and_weights() -> None:
    for members, ranks in process_sets():
        shapes = [(shape, dtype) for shape in SHAPES for dtype in ("float32", "int64")]
        mine = [ndarray(numbers(hvd.rank(), shape, dtype, 5)) for shape, dtype in shapes]
        expected = [stacked(ranks, shape, dtype, 5) for shape, dtype in shapes]
        for result, whole in zip(hvd.grouped_allreduce(mine, op=hvd.Max, process_set=members), expected):
            close(result.asnumpy(), whole.max(0))
        results = hvd.grouped_allreduce_(mine, name="group", process_set=members, prescale_factor=0.5,
                                         postscale_factor=2.0, op=hvd.Sum)  # fmt: skip
        assert all(result is item for result, item in zip(results, mine))
        for (_, dtype), result, whole in zip(shapes, results, expected):
            if dtype == "float32":
                close(result.asnumpy(), whole.sum(0))
    assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []
    weighted = hvd.allreduce(mx.nd.ones((2,)) * hvd.rank(), weight=float(hvd.rank() == hvd.size() - 1))
    assert weighted.asnumpy().tolist() == [hvd.size() - 1.0] * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total = hvd.allreduce(mx.nd.ones((2,)), average=False, priority=3)
    assert total.asnumpy().tolist() == [hvd.size()] * 2
    assert [item.category for item in caught] == [DeprecationWarning]


def check_every_form_with_every_option() -> None:
    names = functions_of("ringcomm.mxnet")
    for members, ranks in process_sets():
        assert (
            compare_forms(hvd, names, ranks, hvd.rank(), members, ndarray, lambda found: found.asnumpy()) > 50
        )


def check_booleans_and_numpy_arrays() -> None:
    flags = ndarray(np.arange(6) % 3 == hvd.rank())
    assert flags.dtype == np.bool_
    total = hvd.allreduce(flags, op=hvd.Max).asnumpy()
    assert total.tolist() == [place % 3 < hvd.size() for place in range(6)]
    array = mx.np.ones((2, 3), ctx=context()) * hvd.rank()
    summed = hvd.allreduce(array, op=hvd.Sum)
    assert type(summed) is mx.np.ndarray and summed.context == array.context
    assert (summed.asnumpy() == sum(range(hvd.size()))).all()


def check_movement() -> None:
    """Each type once in each operation that moves arrays."""
    for members, ranks in process_sets():
        place, size = ranks.index(hvd.rank()), len(ranks)
        for root, dtype in zip(ranks * len(TYPES), [*TYPES, "bool"]):
            own = [numbers(rank, (rank, 3), dtype, 2) for rank in range(hvd.size())]
            mine = ndarray(own[hvd.rank()])
            result = hvd.allgather(mine, process_set=members)
            assert result.context == mine.context and result.dtype == mine.dtype
            assert result.asnumpy().tobytes() == np.concatenate([own[rank] for rank in ranks]).tobytes()
            mine = ndarray(numbers(hvd.rank(), (2 * size, 3), dtype, 6))
            before, wanted = mine.asnumpy(), numbers(root, (2 * size, 3), dtype, 6)
            parts = [np.split(numbers(rank, (2 * size, 3), dtype, 6), size)[place] for rank in ranks]
            result = hvd.alltoall(mine, process_set=members)
            assert result.asnumpy().tobytes() == np.concatenate(parts).tobytes()
            assert hvd.broadcast(mine, root, process_set=members).asnumpy().tobytes() == wanted.tobytes()
            assert (mine.asnumpy() == before).all()
            assert hvd.broadcast_(mine, root, process_set=members) is mine
            assert mine.asnumpy().tobytes() == wanted.tobytes()
        for shape in ((), (0, 3)):
            result = hvd.broadcast(ndarray(np.full(shape, hvd.rank())), ranks[-1], process_set=members)
            assert result.shape == shape and (result.asnumpy() == ranks[-1]).all()
        first, second = hvd.grouped_allgather(
            [mx.nd.ones((1,)) * hvd.rank(), mx.nd.ones((2, 2))], "both", process_set=members
        )
        assert first.asnumpy().tolist() == ranks and second.shape == (2 * size, 2)
        # Each sends so many rows to a rank as the rank's place is; the first gets none.
        mine = ndarray(numbers(hvd.rank(), (size * (size - 1) // 2, 2), "int64", 7))
        splits = mx.nd.array(list(range(size)), dtype="int32", ctx=context())
        rows, received = hvd.alltoall(mine, splits, process_set=members)
        assert rows.shape == (size * place, 2) and received.asnumpy().tolist() == [place] * size
        assert received.dtype == np.int32 and rows.dtype == mine.dtype


def check_reducescatter() -> None:
    for members, ranks in process_sets():
        place, size = ranks.index(hvd.rank()), len(ranks)
        cases = zip((hvd.Average, hvd.Sum, hvd.Min, hvd.Max), (size, 2 * size + 1, 1, 3), TYPES)
        for op, rows, dtype in cases:
            mine = ndarray(numbers(hvd.rank(), (rows, 3), dtype, 4))
            before = mine.asnumpy()
            whole = reduced(op, stacked(ranks, (rows, 3), dtype, 4))
            result = hvd.reducescatter(mine, op, process_set=members)
            close(result.asnumpy(), np.array_split(whole, size)[place])
            assert (mine.asnumpy() == before).all()
        parts = hvd.grouped_reducescatter(
            [mx.nd.ones((size,)), mx.nd.ones((size, 2))], hvd.Sum, process_set=members
        )
        assert [part.shape for part in parts] == [(1,), (1, 2)] and parts[0].asscalar() == size


def check_temporary_and_pending_arrays() -> None:
    """What MXNet still computes is waited for, and what it still reads is not overwritten."""
    ones = mx.nd.ones((400, 400), ctx=context())

    def slowly_one() -> mx.nd.NDArray:
        product = ones
        for _ in range(4):
            product = mx.nd.dot(product, ones) / 400
        return product

    for factor in range(1, 6):  # other values each time, in memory that is used again
        result = hvd.allreduce(slowly_one() * factor, op=hvd.Sum)
        assert (result.asnumpy() == factor * hvd.size()).all()
        target = mx.nd.ones((400, 400), ctx=context())
        target.wait_to_read()
        reader = slowly_one() + target
        hvd.allreduce_(target, op=hvd.Sum, postscale_factor=2.0)
        assert (reader.asnumpy() == 2).all() and (target.asnumpy() == 2 * hvd.size()).all()


def check_parts_of_arrays() -> None:
    whole = mx.nd.zeros((4, 3), ctx=context())
    hvd.allreduce_(whole[1:3], op=hvd.Sum, postscale_factor=1.0)
    part = whole[2]
    part[:] = 1
    assert hvd.allreduce_(part, op=hvd.Sum) is part
    assert whole.asnumpy().tolist() == [[0] * 3, [0] * 3, [hvd.size()] * 3, [0] * 3]


def check_memory_that_is_not_shared() -> None:
    """The way of arrays on GPUs, which are copied to the host and back."""
    shared, arrays.HOST_MEMORY = arrays.HOST_MEMORY, ()
    try:
        mine = ndarray(np.full((3, 2), hvd.rank(), np.float32))
        total = sum(range(hvd.size()))
        assert (hvd.allreduce(mine, op=hvd.Sum).asnumpy() == total).all()
        assert (mine.asnumpy() == hvd.rank()).all()
        assert (hvd.allreduce_(mine, op=hvd.Sum).asnumpy() == total).all() and (mine.asnumpy() == total).all()
        assert hvd.allgather(mine).shape == (3 * hvd.size(), 2)
    finally:
        arrays.HOST_MEMORY = shared


def check_mismatches_are_errors_on_all_ranks() -> None:
    """Horovod's users catch MXNetError or RuntimeError; the next call works."""
    if hvd.size() == 1:
        return
    odd = hvd.rank() == 1
    shape, other = (3, 2), (3, 3)
    here = other if odd else shape
    kind = "int32" if odd else "float32"
    calls: List[Callable[[], Any]] = [
        lambda: hvd.allreduce(mx.nd.ones(shape), op=hvd.Sum if odd else hvd.Average),
        lambda: hvd.allreduce_(mx.nd.ones(here)),
        lambda: hvd.grouped_allreduce([mx.nd.ones(shape), mx.nd.ones(here)]),
        lambda: hvd.allgather(mx.nd.ones(shape, dtype=kind)),
        lambda: hvd.broadcast(mx.nd.ones(shape), 1 if odd else 0),
        lambda: hvd.broadcast_(mx.nd.ones(shape, dtype=kind), 0),
        lambda: hvd.reducescatter(mx.nd.ones(here)),
        lambda: hvd.alltoall(mx.nd.ones((hvd.size(), 3 if odd else 2))),
    ]
    for number, call in enumerate(calls):
        raises((MXNetError, RuntimeError), call)
        assert hvd.allreduce(mx.nd.ones((1,)), op=hvd.Sum).asscalar() == hvd.size(), number


def check_local_errors() -> None:
    size = hvd.size()
    if size > 1:
        raises(RuntimeError, lambda: hvd.alltoall(mx.nd.ones((size + 1,))), "not an even multiple")
        short = mx.nd.ones((size - 1,))
        raises(RuntimeError, lambda: hvd.alltoall(short, mx.nd.ones((size,), dtype="int32")), "greater")
    raises(ValueError, lambda: hvd.alltoall(mx.nd.ones((size,)), mx.nd.ones((size,))), "whole numbers")
    raises(RuntimeError, lambda: hvd.alltoall(mx.nd.ones((size,)), [1] * (size + 1)), "number of workers")
    raises(ValueError, lambda: hvd.reducescatter(mx.nd.empty(())))
    raises(ValueError, lambda: hvd.allgather(mx.nd.empty(())))
    raises(ValueError, lambda: hvd.allreduce(np.ones(3)), "NDArray")
    sparse = mx.nd.sparse.row_sparse_array(([[1.0, 2.0]], [1]), shape=(3, 2))
    raises(ValueError, lambda: hvd.allreduce(sparse), "row_sparse")
    raises(ValueError, lambda: hvd.broadcast(mx.nd.ones((1,)), size), "root_rank")
    raises(ValueError, lambda: hvd.allreduce(mx.nd.ones((1,)), average=True, op=hvd.Sum), "average")
    raises(ValueError, lambda: hvd.allreduce(mx.nd.ones((1,)), process_set=hvd.ProcessSet([0])))
    same_everywhere(hvd.allreduce(mx.nd.ones((1,))).asnumpy())


def check_fp16_compression() -> None:
    for dtype in ("float32", "float64"):
        array = mx.nd.ones((3,), dtype=dtype) / 3
        small, kept = hvd.Compression.fp16.compress(array)
        assert small.dtype == np.float16
        assert hvd.Compression.fp16.decompress(small, kept).dtype == np.dtype(dtype)
    whole = mx.nd.ones((3,), dtype="int32")
    assert hvd.Compression.fp16.compress(whole)[0] is whole
    raises(ValueError, lambda: hvd.Compression.bf16.compress(mx.nd.ones((3,))), "DistributedTrainer")
