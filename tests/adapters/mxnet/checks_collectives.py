"""What every rank checks about the collectives of ringcomm.mxnet, against NumPy in float64."""

from __future__ import annotations

import warnings
from typing import Any, List

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError

import ringcomm.mxnet as hvd
from ringcomm.mxnet import collectives
from tests.adapters import contract
from tests.adapters.jobs import same_everywhere
from tests.support.errors import raises
from tests.support.options import compare_forms

TYPES = ["float16", "float32", "float64", "uint8", "int8", "int32", "int64"]


def context() -> mx.Context:
    """Horovod's users give every rank a context of its own."""
    return mx.cpu(hvd.rank())


def ndarray(array: Any) -> mx.nd.NDArray:
    with mx.util.np_shape(True):  # without it MXNet has neither scalars nor empty arrays
        return mx.nd.array(array, dtype=array.dtype, ctx=context())


def called(function: Any, given: Any) -> List[Any]:
    """Call a function with NDArrays; the arguments stay as they are, and results are where they are."""
    passed = [ndarray(array) for array in given]
    results = function(*passed)
    for array, before in zip(passed, given):
        assert array.asnumpy().tobytes() == np.asarray(before).tobytes()
    assert all(result.context == passed[0].context for result in results)
    return [result.asnumpy() for result in results]


def check_results() -> None:
    contract.check_collectives(hvd, called, TYPES)
    contract.check_a_mismatch(hvd, called, (MXNetError, RuntimeError))


def check_every_form_with_every_option() -> None:
    """Of all ranks, and of this rank's half of them, as Horovod's tests have it."""
    contract.check_every_form(hvd, "ringcomm.mxnet", ndarray, lambda found: found.asnumpy())
    if hvd.size() > 1:
        every = list(range(hvd.size()))
        halves = [hvd.add_process_set(every[::2]), hvd.add_process_set(every[1::2])]
        mine, names = halves[hvd.rank() % 2], ["allreduce_", "broadcast_", "grouped_allgather"]
        compare_forms(hvd, names, mine.ranks, hvd.rank(), mine, ndarray, lambda found: found.asnumpy())
        hvd.barrier()
        assert all(hvd.remove_process_set(half) for half in halves)


def check_empty_groups_and_older_arguments() -> None:
    assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total = hvd.allreduce(mx.nd.ones((2,)), average=False, priority=3)
    assert total.asnumpy().tolist() == [hvd.size()] * 2
    assert [item.category for item in caught] == [DeprecationWarning]


def check_booleans_and_numpy_arrays() -> None:
    flags = ndarray(np.arange(6) % 3 == hvd.rank())
    assert flags.dtype == np.bool_
    total = hvd.allreduce(flags, op=hvd.Max).asnumpy()
    assert total.tolist() == [place % 3 < hvd.size() for place in range(6)]
    array = mx.np.ones((2, 3), ctx=context()) * hvd.rank()
    summed = hvd.allreduce(array, op=hvd.Sum)
    assert type(summed) is mx.np.ndarray and summed.context == array.context
    assert (summed.asnumpy() == sum(range(hvd.size()))).all()


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
    shared, collectives.HOST_MEMORY = collectives.HOST_MEMORY, ()
    try:
        mine = ndarray(np.full((3, 2), hvd.rank(), np.float32))
        total = sum(range(hvd.size()))
        assert (hvd.allreduce(mine, op=hvd.Sum).asnumpy() == total).all()
        assert (mine.asnumpy() == hvd.rank()).all()
        assert (hvd.allreduce_(mine, op=hvd.Sum).asnumpy() == total).all() and (mine.asnumpy() == total).all()
        assert hvd.allgather(mine).shape == (3 * hvd.size(), 2)
    finally:
        collectives.HOST_MEMORY = shared


def check_local_errors() -> None:
    size = hvd.size()
    if size > 1:
        raises(RuntimeError, lambda: hvd.alltoall(mx.nd.ones((size + 1,))), "not an even multiple")
    raises(ValueError, lambda: hvd.alltoall(mx.nd.ones((size,)), mx.nd.ones((size,))), "whole numbers")
    raises(RuntimeError, lambda: hvd.alltoall(mx.nd.ones((size,)), [1] * (size + 1)), "number of workers")
    for call in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
        raises(ValueError, lambda call=call: call(mx.nd.empty(())))  # type: ignore[misc]
    raises(ValueError, lambda: hvd.allreduce(np.ones(3)), "NDArray")
    sparse = mx.nd.sparse.row_sparse_array(([[1.0, 2.0]], [1]), shape=(3, 2))
    raises(ValueError, lambda: hvd.allreduce(sparse), "row_sparse")
    raises(ValueError, lambda: hvd.broadcast(mx.nd.ones((1,)), size), "root_rank")
    raises(ValueError, lambda: hvd.allreduce(mx.nd.ones((1,)), average=True, op=hvd.Sum), "average")
    raises(ValueError, lambda: hvd.allreduce(mx.nd.ones((1,)), process_set=hvd.ProcessSet([0])))
    same_everywhere(hvd.allreduce(mx.nd.ones((1,))).asnumpy())
