"""What every rank checks about collectives: types, operations, shapes, gradients, sparse tensors, errors."""

from __future__ import annotations

import warnings
from typing import Any, List, Sequence

import ml_dtypes  # noqa: F401 - for the name bfloat16
import torch

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.arrays.torch_tensors import elements_of, tensor_of
from tests.adapters import contract
from tests.support.errors import raises

TYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "complex64",
]  # fmt: skip


def mode(function: Any, arrays: Sequence[Any]) -> List[Any]:
    """Call a function of ringcomm.torch with arrays; see :mod:`tests.adapters.contract`."""
    return [elements_of(result) for result in function(*map(tensor_of, arrays))]


def check_ranks_and_sizes() -> None:
    assert hvd.is_initialized() and hvd.is_homogeneous()
    assert 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not any([hvd.mpi_built(), hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.nccl_built(),
                    hvd.ddl_built(), hvd.ccl_built(), hvd.cuda_built(), hvd.rocm_built()])  # fmt: skip
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))


def check_collectives() -> None:
    contract.check_collectives(hvd, mode, TYPES)


def check_what_only_the_ranks_together_can_notice() -> None:
    contract.check_a_mismatch(hvd, mode, hvd.HorovodInternalError, "Mismatched")


def check_weighted_averages() -> None:
    """The gradient is that of the loss of all ranks: the sum of ``c_r * allreduce(x)`` over ranks."""
    weights = [3.0 + rank for rank in range(hvd.size())]
    given = torch.randn(37, dtype=torch.float64, requires_grad=True)
    (hvd.allreduce(given, weight=weights[hvd.rank()]) * (1.0 + hvd.rank())).sum().backward()
    share = weights[hvd.rank()] / sum(weights) * sum(1.0 + rank for rank in range(hvd.size()))
    torch.testing.assert_close(given.grad, torch.full((37,), share, dtype=torch.float64), rtol=1e-12, atol=0)
    ones = torch.ones(3)
    own = torch.full((3,), float("nan")) if hvd.rank() else ones  # ignored, with a weight of 0
    assert hvd.allreduce(own, weight=0.0 if hvd.rank() else 2.0).tolist() == [1.0] * 3
    raises(rc.Misuse, lambda: hvd.allreduce(ones, weight=1.0, op=hvd.Sum), "op=Sum")


def check_gradients_flow() -> None:
    size, rank = hvd.size(), hvd.rank()

    def gradient(function, shape=(4, 3), outputs=1):
        tensor = torch.ones(shape, requires_grad=True)
        result = function(tensor)
        result = result if isinstance(result, (list, tuple)) else [result]
        sum(((rank + 1) * item).sum() for item in result).backward()
        return tensor.grad

    mean = sum(range(1, size + 1)) / size
    for op, value in ((hvd.Average, mean), (hvd.Sum, mean * size)):
        assert torch.allclose(gradient(lambda x, op=op: hvd.allreduce(x, op=op)), torch.tensor(value))
        assert torch.allclose(gradient(lambda x, op=op: hvd.grouped_allreduce([x, 2 * x], op=op)),
                              torch.tensor(3 * value))  # fmt: skip
    scaled = gradient(lambda x: hvd.allreduce(x, prescale_factor=2.0, postscale_factor=0.5))
    assert torch.allclose(scaled, torch.tensor(mean))
    assert torch.allclose(gradient(lambda x: hvd.allgather(x), (rank + 1, 2)), torch.tensor(mean))
    assert torch.allclose(gradient(lambda x: hvd.grouped_allgather([x, x])), torch.tensor(2 * mean))
    own = mean if rank == 0 else 0.0
    assert torch.allclose(gradient(lambda x: hvd.broadcast(x, 0)), torch.tensor(own))
    back = gradient(lambda x: hvd.alltoall(x), (size, 2))
    assert back[:, 0].tolist() == [item + 1 for item in range(size)]
    splits = [1] * size
    back = gradient(lambda x: hvd.alltoall(x, splits)[0], (size, 2))
    assert back[:, 0].tolist() == [item + 1 for item in range(size)]
    rows = torch.arange(1, size + 1).float()
    assert gradient(lambda x: hvd.reducescatter(x), (size, 2))[:, 0].tolist() == rows.tolist()
    back = gradient(lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum, prescale_factor=3.0), (size, 2))
    assert torch.allclose(back[:, 0], 3 * size * rows)


def check_sparse() -> None:
    size, rank = hvd.size(), hvd.rank()
    for op, dtype in ((hvd.Average, torch.float32), (hvd.Sum, torch.bfloat16)):
        count = rank % 3  # some ranks have no entries
        indices = torch.stack([torch.arange(count), torch.full((count,), rank)])
        values = torch.ones(count, dtype=dtype)
        mine = torch.sparse_coo_tensor(indices, values, (4, size), check_invariants=True)
        result = hvd.synchronize(hvd.sparse_allreduce_async(mine, name="sparse", op=op))
        assert result.is_sparse and result.shape == mine.shape and result.dtype == dtype
        expected = torch.zeros(4, size)
        for item in range(size):
            expected[: item % 3, item] += 1 / (size if op == hvd.Average else 1)
        torch.testing.assert_close(result.to_dense().float(), expected, rtol=1e-2, atol=1e-2)


# ---- errors of a rank of its own -----------------------------------------------------------------


def check_local_errors() -> None:
    size = hvd.size()
    ones = torch.ones(size, 2)
    raises(ValueError, lambda: hvd.allreduce(ones, average=True, op=hvd.Sum), "average")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(hvd.allreduce(ones, average=False), size * ones)
    assert [item.category for item in caught] == [DeprecationWarning]
    assert caught[0].filename == __file__
    splits = [1] * size
    raises(ValueError, lambda: hvd.alltoall(ones, [2] + splits[1:]), "greater than the first dimension")
    raises(ValueError, lambda: hvd.alltoall(ones, splits + [0]), "number of workers")
    raises(ValueError, lambda: hvd.alltoall(ones, torch.ones(size)), "list of whole numbers")
    if size > 1:
        raises(ValueError, lambda: hvd.alltoall(torch.ones(size + 1)), "not an even multiple")
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(1), name="twice") if hvd.rank() == 0 else None
        if hvd.rank() == 0:
            raises(ValueError, lambda: hvd.allreduce_async(torch.ones(1), name="twice"), "same name")
        hvd.barrier()
        handle = handle or hvd.allreduce_async(torch.ones(1), name="twice")
        assert hvd.synchronize(handle).item() == 1.0
    for function in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        raises(RuntimeError, lambda function=function: function(torch.tensor(1.0)), "dimension")
    raises(NotImplementedError, lambda: hvd.reducescatter(ones, op=hvd.Adasum), "Adasum")
    raises(ValueError, lambda: hvd.allreduce(ones.to_sparse()), "sparse")
    raises(ValueError, lambda: hvd.broadcast(ones, size), "root_rank")
    raises(ValueError, lambda: hvd.sparse_allreduce_async(ones.to_sparse(), "s", hvd.Max), "Sum")
    raises(ValueError, lambda: hvd.init(process_sets=[[0], [0]]), "entry number 2")
    raises(ValueError, lambda: hvd.init(comm=object()), "MPI")
    hvd.init(comm=list(range(size)), process_sets="dynamic")
