"""Reductions over ringcomm, and by hand."""

from __future__ import annotations

import operator
from functools import reduce as fold

import torch
import torch.distributed as dist

from tests.adapters.torch_distributed.harness import Ranks

REDUCE = dist.ReduceOp
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITWISE = {REDUCE.BAND: operator.and_, REDUCE.BOR: operator.or_, REDUCE.BXOR: operator.xor}
BY_HAND = {
    REDUCE.SUM: torch.add,
    REDUCE.AVG: torch.add,
    REDUCE.MIN: torch.minimum,
    REDUCE.MAX: torch.maximum,
    REDUCE.PRODUCT: torch.mul,
    **BITWISE,
}
NAMES = ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank contributes.

    Small numbers, so that products fit and sums of half types are exact.
    """
    generator = torch.Generator().manual_seed(rank * 1000 + count)
    values = torch.randint(0, 4, (count,), generator=generator)
    return values.to(torch.bool) if dtype is torch.bool else values.to(dtype)


def by_hand(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    kind, dtype = getattr(REDUCE, op), tensors[0].dtype
    if dtype is torch.bool and op in ("SUM", "MAX", "PRODUCT", "MIN"):
        return fold(operator.or_ if op in ("SUM", "MAX") else operator.and_, tensors)
    total = fold(BY_HAND[kind], tensors)
    if op == "AVG":
        wide = total.double() / len(tensors)
        return wide.to(dtype) if dtype.is_floating_point else wide.trunc().to(dtype)
    return total


def ops_for(dtype: torch.dtype) -> list[str]:
    if dtype.is_floating_point:
        return [name for name in NAMES if name[0] != "B"]
    return [name for name in NAMES if dtype is not torch.bool or name != "AVG"]


def close(got: torch.Tensor, wanted: torch.Tensor, why: object) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, why
    if got.dtype.is_floating_point or got.dtype.is_complex:
        assert torch.allclose(got, wanted, rtol=1e-2 if got.itemsize == 2 else 1e-6), why
    else:
        assert torch.equal(got, wanted), (why, got[:5], wanted[:5])


def check_all_reduce(on: Ranks) -> None:
    """Each type once with each operation; other sizes with a sum."""
    cases = [(dtype, op, 7) for dtype in [torch.bool, *INTEGERS, *FLOATS] for op in ops_for(dtype)]
    for dtype, op, count in cases + [(torch.float32, "SUM", count) for count in (0, 1, 70_001)]:
        per_rank = [numbers(rank, count, dtype) for rank in range(on.size)]
        mine = per_rank[on.rank].clone()
        dist.all_reduce(mine, getattr(REDUCE, op))
        close(mine, by_hand(op, per_rank), (dtype, op, count))


def check_all_reduce_of_complex_numbers(on: Ranks) -> None:
    for dtype in (torch.complex64, torch.complex128):
        for op in ("SUM", "AVG"):
            per_rank = [
                torch.complex(
                    torch.arange(5.0, dtype=torch.float64) + rank, torch.ones(5, dtype=torch.float64)
                ).to(dtype)
                for rank in range(on.size)
            ]
            mine = per_rank[on.rank].clone()
            dist.all_reduce(mine, getattr(REDUCE, op))
            close(mine, sum(per_rank) / (on.size if op == "AVG" else 1), (dtype, op))
        pieces = [per_rank[0].conj() for _ in range(on.size)]  # not computed yet
        got = [torch.empty_like(mine) for _ in range(on.size)]
        on.ring.alltoall(got, pieces).wait()
        close(got[0], per_rank[0].conj().resolve_conj(), "conjugated")


def check_unsigned_numbers(on: Ranks) -> None:
    """PyTorch itself cannot add them up."""
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"):
            per_rank = [numbers(rank, 9, torch.int64) for rank in range(on.size)]
            mine = per_rank[on.rank].to(dtype)
            dist.all_reduce(mine, getattr(REDUCE, op))
            close(mine, by_hand(op, per_rank).to(dtype), (dtype, op))
            share = torch.empty(9, dtype=dtype)
            whole = torch.cat([per_rank[on.rank].to(dtype)] * on.size)
            dist.reduce_scatter_tensor(share, whole, getattr(REDUCE, op))
            close(share, mine, (dtype, op))


def check_premultiplied_sum(on: Ranks) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        per_rank = [numbers(rank, 9, dtype) for rank in range(on.size)]
        mine = per_rank[on.rank].clone()
        dist.all_reduce(mine, dist._make_nccl_premul_sum(2.0))
        close(mine, sum(per_rank) * 2, dtype)
        share, whole = torch.empty(9, dtype=dtype), mine.repeat(on.size)
        dist.reduce_scatter_tensor(share, whole.clone(), dist._make_nccl_premul_sum(3.0))
        close(share, mine * 3 * on.size, dtype)


def check_layouts(on: Ranks) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4) + on.rank
    total = sum(torch.arange(24.0).reshape(2, 3, 4) + rank for rank in range(on.size))
    for view in (
        lambda t: t.transpose(0, 2),
        lambda t: t[:, 1:, ::2],
        lambda t: t[..., 0],
        lambda t: t[0, 0, 0],
    ):
        mine = base.clone()
        dist.all_reduce(view(mine))
        close(view(mine).contiguous(), view(total).contiguous(), "view")
        mine = base.clone().requires_grad_()
        dist.broadcast(view(mine.detach()), 0)
        close(
            view(mine.detach()).contiguous(), view(torch.arange(24.0).reshape(2, 3, 4)).contiguous(), "view"
        )
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(image, torch.full((2, 3, 4, 5), float(on.size)))


def check_reduce(on: Ranks) -> None:
    for root in range(on.size):
        for count, op in ((5, "SUM"), (0, "MAX"), (5, "BXOR"), (70_001, "AVG")):
            dtype = torch.int32 if op == "BXOR" else torch.float32
            per_rank = [numbers(rank, count, dtype) for rank in range(on.size)]
            mine = per_rank[on.rank].clone()
            dist.reduce(mine, root, getattr(REDUCE, op))
            expected = by_hand(op, per_rank) if on.rank == root else per_rank[on.rank]
            close(mine, expected, (count, root, op))


def check_reduce_scatter(on: Ranks) -> None:
    for dtype in (torch.int64, torch.bfloat16, torch.float64, torch.uint8):
        for op in ops_for(dtype):
            pieces = [[numbers(r * 10 + s, 33, dtype) for s in range(on.size)] for r in range(on.size)]
            expected = by_hand(op, [pieces[r][on.rank] for r in range(on.size)])
            inputs = [piece.clone() for piece in pieces[on.rank]]
            got = torch.empty(33, dtype=dtype)
            dist.reduce_scatter(got, inputs, getattr(REDUCE, op))
            close(got, expected, (dtype, op))
            whole = torch.cat(inputs)
            got.zero_()
            dist.reduce_scatter_tensor(got, whole, getattr(REDUCE, op))
            close(got, expected, (dtype, op))
            assert torch.equal(whole, torch.cat(pieces[on.rank])), "the input has changed"


def check_uneven_reduce_scatter(on: Ranks) -> None:
    inputs = [torch.full((3 + r,), float(on.rank + r)) for r in range(on.size)]
    got = torch.empty(3 + on.rank)
    dist.reduce_scatter(got, inputs)
    close(got, torch.full((3 + on.rank,), float(sum(r + on.rank for r in range(on.size)))), "uneven")


def check_coalesced(on: Ranks) -> None:
    mixed = [torch.ones(3), torch.full((2, 2), 2.0), torch.ones(100_000), torch.ones(4, dtype=torch.float64)]
    on.ring.allreduce_coalesced(mixed).wait()
    for tensor, value in zip(mixed, (1.0, 2.0, 1.0, 1.0)):
        assert torch.equal(tensor, torch.full_like(tensor, value * on.size))
    small = [torch.ones(3), torch.ones(2, 2).t(), torch.ones(0)]
    dist.all_reduce_coalesced(small)
    assert all(bool((tensor == on.size).all()) for tensor in small)
    pairs = [(torch.empty(2), torch.ones(2 * on.size)), (torch.empty(3), torch.ones(3 * on.size))]
    with dist._coalescing_manager(on.ring, torch.device("cpu")):
        for output, source in pairs:
            dist.reduce_scatter_tensor(output, source)
    assert all(bool((output == on.size).all()) for output, _ in pairs)
    with dist._coalescing_manager(on.ring, async_ops=True) as manager:
        dist.all_reduce(pairs[0][0])
        dist.all_reduce(pairs[1][0])
    manager.wait()
    assert all(bool((output == on.size**2).all()) for output, _ in pairs)


def check_sparse(on: Ranks) -> None:
    def own(rank: int) -> torch.Tensor:
        rows = [[rank, 5, 5]] if rank % 2 == 0 else [[3]]
        return torch.sparse_coo_tensor(rows, torch.ones(len(rows[0]), 2) + rank, (6, 2))

    for op in ("SUM", "AVG"):
        mine = own(on.rank)
        dist.all_reduce(mine, getattr(REDUCE, op))
        total = sum(own(rank).to_dense() for rank in range(on.size))
        close(mine.to_dense(), total / (on.size if op == "AVG" else 1), op)
    rows = torch.arange(6.0).view(2, 3).t()
    mine = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), rows, (3, 2), is_coalesced=True)
    dist.all_reduce(mine, dist._make_nccl_premul_sum(2.0))
    close(mine.to_dense(), rows * 2 * on.size, "factor of rows that are not contiguous")
