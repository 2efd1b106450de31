"""What every rank checks about collectives: each type, operation and shape, gradients, sparse tensors.

Every form with every option is tried on threads, in ``test_options.py``, and every combination of types and
operations without a framework, in tests/integration/collective and engine.
"""

from __future__ import annotations

from typing import Any, List, Sequence

import ml_dtypes  # noqa: F401 - for the name bfloat16
import numpy as np
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


def check_compression_of_integers() -> None:
    whole, context = hvd.Compression.fp16.compress(torch.ones(2, dtype=torch.int32))
    assert whole.dtype == torch.int32
    assert hvd.Compression.fp16.decompress(whole, context).dtype == torch.int32


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
    if hvd.size() > 1:
        weight = 1.0 if hvd.rank() else None
        text = "some with and some without weights"
        raises(rc.MismatchError, lambda: hvd.allreduce(ones, weight=weight, name="mixed"), text)
    nothing = "weights of all ranks are 0"
    raises(rc.RingcommError, lambda: hvd.allreduce(ones, weight=0.0, name="nothing"), nothing)
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


def check_objects() -> None:
    value = {"rank": hvd.rank(), "deep": [np.arange(3), torch.ones(2), lambda: hvd.rank()]}
    for root in range(hvd.size()):
        got = hvd.broadcast_object(value, root)
        assert got["rank"] == root and got["deep"][2]() in range(hvd.size())
    assert hvd.broadcast_object(None, 0, name="nothing") is None
    per_rank = hvd.allgather_object("x" * hvd.rank() * 1000, name="texts")
    assert [len(item) for item in per_rank] == [1000 * item for item in range(hvd.size())]
