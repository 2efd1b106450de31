"""What every rank checks about collectives, against float64: each type, operation, shape and form once.

Every combination of them is tried without a framework, in tests/integration/collective and engine.
"""

from __future__ import annotations

import numpy as np
import torch

import ringcomm.torch as hvd
from tests.adapters.torch.harness import all_inputs, close, numbers, same_everywhere

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SHAPES = [(), (1,), (0, 3), (7,), (3, 5), (2, 3, 4)]


def check_ranks_and_sizes() -> None:
    assert hvd.is_initialized() and hvd.is_homogeneous()
    assert 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not any([hvd.mpi_built(), hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.nccl_built(),
                    hvd.ddl_built(), hvd.ccl_built(), hvd.cuda_built(), hvd.rocm_built()])  # fmt: skip
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def expected_reduction(op: int, per_rank: torch.Tensor) -> torch.Tensor:
    if op == hvd.Average:
        return per_rank.sum(0) / len(per_rank)
    if op == hvd.Sum:
        return per_rank.sum(0)
    if op == hvd.Product:
        return per_rank.prod(0)
    return per_rank.amin(0) if op == hvd.Min else per_rank.amax(0)


def check_allreduce() -> None:
    cases = [(hvd.Sum, dtype, (3, 5)) for dtype in FLOATS + INTEGERS]
    cases += [(op, torch.float32, (3, 5)) for op in (hvd.Min, hvd.Max, hvd.Product)]
    cases += [(hvd.Average, torch.float32, shape) for shape in SHAPES]
    results = []
    for salt, (op, dtype, shape) in enumerate(cases):
        mine = numbers(hvd.rank(), shape, dtype, salt)
        before = mine.clone()
        result = hvd.allreduce(mine, op=op)
        close(result, expected_reduction(op, all_inputs(shape, dtype, salt)))
        assert result.dtype == dtype and torch.equal(mine, before)
        assert hvd.allreduce_(mine, op=op) is mine and torch.equal(mine, result)
        results.append(result.double().view(-1))
    same_everywhere(torch.cat(results))


def check_grouped() -> None:
    mine = [
        numbers(hvd.rank(), shape, dtype, 5) for shape in SHAPES for dtype in (torch.float32, torch.int64)
    ]
    expected = [all_inputs(item.shape, item.dtype, 5) for item in mine]
    for result, all_of_it in zip(hvd.grouped_allreduce(mine, op=hvd.Sum, name="group"), expected):
        close(result, all_of_it.sum(0))
    handle = hvd.grouped_allreduce_async(mine, op=hvd.Max)
    for result, all_of_it in zip(hvd.synchronize(handle), expected):
        close(result, all_of_it.amax(0))
    results = hvd.grouped_allreduce_(mine, op=hvd.Average)
    assert all(result is item for result, item in zip(results, mine))
    for result, all_of_it in zip(results, expected):
        close(result, all_of_it.sum(0) / hvd.size())


def check_allgather() -> None:
    size, rank = hvd.size(), hvd.rank()
    whole = [numbers(item, ((item + 1) % 3, 4), torch.bool) for item in range(size)]
    result = hvd.allgather(whole[rank])
    assert result.dtype == torch.bool and torch.equal(result, torch.cat(whole))
    pieces = [[numbers(item, (item, 2), torch.float32), numbers(item, (2,), torch.bfloat16)]
              for item in range(size)]  # fmt: skip
    first, second = hvd.grouped_allgather(pieces[rank])
    assert torch.equal(first, torch.cat([item[0] for item in pieces]))
    assert torch.equal(second, torch.cat([item[1] for item in pieces]))
    assert torch.equal(hvd.synchronize(hvd.allgather_async(pieces[rank][1], name="later")), second)
    assert len(hvd.synchronize(hvd.grouped_allgather_async(pieces[rank]))) == 2


def check_broadcast() -> None:
    root = hvd.size() - 1
    for dtype, shape in ((torch.float64, ()), (torch.bool, (3, 2)), (torch.int16, (0,))):
        mine = numbers(hvd.rank(), shape, dtype)
        before, sent = mine.clone(), numbers(root, shape, dtype)
        assert torch.equal(hvd.broadcast(mine, root), sent) and torch.equal(mine, before)
        assert hvd.broadcast_(mine, root) is mine and torch.equal(mine, sent)
    handle = hvd.broadcast_async(torch.full((2,), float(hvd.rank())), root, name="b")
    assert hvd.synchronize(handle).tolist() == [root, root]
    parameter = torch.nn.Parameter(torch.full((2,), float(hvd.rank())))
    hvd.synchronize(hvd.broadcast_async_(parameter, root))
    assert parameter.tolist() == [root, root]


def check_alltoall() -> None:
    size, rank = hvd.size(), hvd.rank()
    even = torch.arange(2 * size).to(torch.bfloat16) + 10 * rank
    result = hvd.alltoall(even)
    assert result.tolist() == [10 * item + 2 * rank + part for item in range(size) for part in (0, 1)]
    splits = [(rank + to) % 3 for to in range(size)]
    rows = torch.cat([torch.full((count, 2), to) for to, count in enumerate(splits)])
    for given in (splits, torch.tensor(splits, dtype=torch.int32)):
        received, counts = hvd.alltoall(rows, given)
        assert counts.tolist() == [(item + rank) % 3 for item in range(size)]
        assert counts.dtype == torch.int32
        assert torch.equal(received, torch.full((int(counts.sum()), 2), rank))
    pair = hvd.synchronize(hvd.alltoall_async(torch.arange(size)))
    assert pair[0].tolist() == [rank] * size and pair[1].tolist() == [1] * size


def check_reducescatter() -> None:
    size, rank = hvd.size(), hvd.rank()
    for rows, dtype in ((1, torch.float32), (size + 1, torch.bfloat16), (2 * size + 1, torch.int32)):
        per_rank = all_inputs((rows, 3), dtype)
        bounds = np.cumsum([0] + [rows // size + (item < rows % size) for item in range(size)])
        own = slice(int(bounds[rank]), int(bounds[rank + 1]))
        mine = numbers(rank, (rows, 3), dtype)
        close(hvd.reducescatter(mine), (per_rank.sum(0) / size)[own])
        close(hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=2.0), 2 * per_rank.sum(0)[own])
        one, two = hvd.grouped_reducescatter([mine, mine], op=hvd.Max)
        close(one, per_rank.amax(0)[own])
        assert torch.equal(one, two)
        close(hvd.synchronize(hvd.reducescatter_async(mine, name="rs")), (per_rank.sum(0) / size)[own])
        handle = hvd.grouped_reducescatter_async([mine], op=hvd.Min)
        close(hvd.synchronize(handle)[0], per_rank.amin(0)[own])


def check_compression() -> None:
    mine = numbers(hvd.rank(), (50,), torch.float32)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(mine, op=hvd.Sum, compression=compression)
        assert result.dtype == torch.float32
        torch.testing.assert_close(
            result, all_inputs((50,), torch.float32).sum(0).float(), rtol=1e-2, atol=1e-2
        )
        (grouped,) = hvd.grouped_allreduce([mine], op=hvd.Sum, compression=compression)
        assert torch.equal(grouped, result)
        part = hvd.reducescatter(torch.ones(hvd.size()), compression=compression)
        assert part.dtype == torch.float32 and part.tolist() == [1.0]
    whole, context = hvd.Compression.fp16.compress(torch.ones(2, dtype=torch.int32))
    assert whole.dtype == torch.int32
    assert hvd.Compression.fp16.decompress(whole, context).dtype == torch.int32


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
