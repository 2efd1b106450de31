"""Collectives over ringcomm, and what must come of them, computed by hand."""

from __future__ import annotations

import operator
from functools import reduce as fold

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from ringcomm.errors import Misuse
from tests.adapters.torch_distributed.harness import Ranks
from tests.support.errors import raises

REDUCE = dist.ReduceOp
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
"""PyTorch itself cannot add them up."""
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MOVED = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip
BY_HAND = {
    "SUM": torch.add, "AVG": torch.add, "MIN": torch.minimum, "MAX": torch.maximum, "PRODUCT": torch.mul,
    "BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor,
}  # fmt: skip


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank contributes: small, so that products fit and sums of half types are exact."""
    generator = torch.Generator().manual_seed(rank * 1000 + count)
    values = torch.randint(0, 4, (count,), generator=generator).to(dtype)
    return values + 1j if dtype.is_complex else values


def by_hand(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    dtype = tensors[0].dtype
    if dtype is torch.bool and op in ("SUM", "MAX", "PRODUCT", "MIN"):
        return fold(operator.or_ if op in ("SUM", "MAX") else operator.and_, tensors)
    wide = [item.to(torch.int64) for item in tensors] if dtype in UNSIGNED else tensors
    total = fold(BY_HAND[op], wide)
    if op == "AVG":
        mean = total / len(tensors) if dtype.is_complex else total.double() / len(tensors)
        return mean.to(dtype) if dtype.is_floating_point or dtype.is_complex else mean.trunc().to(dtype)
    return total.to(dtype)


def ops_for(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["SUM", "AVG"]
    if dtype.is_floating_point:
        return [name for name in BY_HAND if name[0] != "B"]
    return [name for name in BY_HAND if dtype is not torch.bool or name != "AVG"]


def same(got: torch.Tensor, wanted: torch.Tensor, why: object = "") -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, why
    if got.itemsize == 1 or not (got.is_floating_point() or got.is_complex()):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), (why, got, wanted)
    else:
        assert torch.allclose(got, wanted, rtol=1e-2 if got.itemsize == 2 else 1e-6), (why, got, wanted)


def filled(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose values show its rank."""
    return ((torch.arange(torch.Size(shape).numel()) % 3 + rank) % 5).reshape(shape).to(dtype)


def space(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).to(dtype)


def check_all_reduce(on: Ranks) -> None:
    """Each type once with each operation; other sizes with a sum."""
    kinds = [torch.bool, *INTEGERS, *UNSIGNED, *FLOATS, torch.complex64, torch.complex128]
    cases = [(dtype, op, 7) for dtype in kinds for op in ops_for(dtype)]
    for dtype, op, count in cases + [(torch.float32, "SUM", count) for count in (0, 1, 70_001)]:
        per_rank = [numbers(rank, count, dtype) for rank in range(on.size)]
        mine = per_rank[on.rank].clone()
        dist.all_reduce(mine, getattr(REDUCE, op))
        same(mine, by_hand(op, per_rank), (dtype, op, count))


def check_premultiplied_sum(on: Ranks) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        per_rank = [numbers(rank, 9, dtype) for rank in range(on.size)]
        mine = per_rank[on.rank].clone()
        dist.all_reduce(mine, dist._make_nccl_premul_sum(2.0))
        same(mine, sum(per_rank) * 2, dtype)
        share, whole = torch.empty(9, dtype=dtype), mine.repeat(on.size)
        dist.reduce_scatter_tensor(share, whole.clone(), dist._make_nccl_premul_sum(3.0))
        same(share, mine * 3 * on.size, dtype)


def check_reduce(on: Ranks) -> None:
    for root in range(on.size):
        for count, op in ((5, "SUM"), (0, "MAX"), (5, "BXOR"), (70_001, "AVG")):
            dtype = torch.int32 if op == "BXOR" else torch.float32
            per_rank = [numbers(rank, count, dtype) for rank in range(on.size)]
            mine = per_rank[on.rank].clone()
            dist.reduce(mine, root, getattr(REDUCE, op))
            expected = by_hand(op, per_rank) if on.rank == root else per_rank[on.rank]
            same(mine, expected, (count, root, op))


def check_reduce_scatter(on: Ranks) -> None:
    for dtype in (torch.int64, torch.bfloat16, torch.float64, torch.uint16):
        for op in ops_for(dtype):
            pieces = [[numbers(r * 10 + s, 33, dtype) for s in range(on.size)] for r in range(on.size)]
            expected = by_hand(op, [pieces[r][on.rank] for r in range(on.size)])
            inputs = [piece.clone() for piece in pieces[on.rank]]
            got = torch.empty(33, dtype=dtype)
            dist.reduce_scatter(got, inputs, getattr(REDUCE, op))
            same(got, expected, (dtype, op))
            whole = torch.cat(inputs)
            got.zero_()
            dist.reduce_scatter_tensor(got, whole, getattr(REDUCE, op))
            same(got, expected, (dtype, op))
            assert torch.equal(whole, torch.cat(pieces[on.rank])), "the input has changed"
    inputs = [torch.full((3 + r,), float(on.rank + r)) for r in range(on.size)]
    got = torch.empty(3 + on.rank)
    dist.reduce_scatter(got, inputs)
    same(got, torch.full((3 + on.rank,), float(sum(r + on.rank for r in range(on.size)))), "uneven")


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
    outputs = [torch.empty(2 * on.size), torch.empty(3 * on.size)]
    inputs = [torch.full((2,), float(on.rank)), torch.full((3,), float(on.rank))]
    with dist._coalescing_manager(on.ring):
        for output, source in zip(outputs, inputs):
            dist.all_gather_into_tensor(output, source)
    for output, count in zip(outputs, (2, 3)):
        same(output, torch.arange(float(on.size)).repeat_interleave(count))
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(on.size)]
    on.ring.allgather_coalesced(lists, inputs).wait()
    for rank, items in enumerate(lists):
        assert all(bool((item == rank).all()) for item in items)


def check_sparse(on: Ranks) -> None:
    def own(rank: int) -> torch.Tensor:
        rows = [[rank, 5, 5]] if rank % 2 == 0 else [[3]]
        return torch.sparse_coo_tensor(rows, torch.ones(len(rows[0]), 2) + rank, (6, 2))

    for op in ("SUM", "AVG"):
        mine = own(on.rank)
        dist.all_reduce(mine, getattr(REDUCE, op))
        total = sum(own(rank).to_dense() for rank in range(on.size))
        same(mine.to_dense(), total / (on.size if op == "AVG" else 1), op)
    rows = torch.arange(6.0).view(2, 3).t()
    mine = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), rows, (3, 2), is_coalesced=True)
    dist.all_reduce(mine, dist._make_nccl_premul_sum(2.0))
    same(mine.to_dense(), rows * 2 * on.size, "factor of rows that are not contiguous")


def check_movement(on: Ranks) -> None:
    """Each type with one shape, and each shape with one type."""
    for dtype, shape in [(dtype, (3, 2)) for dtype in MOVED] + [
        (torch.float32, shape) for shape in ((0,), (1,), (200, 200))
    ]:
        wanted = [filled(rank, shape, dtype) for rank in range(on.size)]
        for root in range(on.size):
            mine = wanted[on.rank].clone()
            dist.broadcast(mine, root)
            same(mine, wanted[root])
            at_root = on.rank == root
            places = [space(shape, dtype) for _ in wanted] if at_root else None
            dist.gather(wanted[on.rank], places, root)
            for got, expected in zip(places or [], wanted):
                same(got, expected)
            got = space(shape, dtype)
            dist.scatter(got, wanted if at_root else None, root)
            same(got, wanted[on.rank])
        places = [space(shape, dtype) for _ in wanted]
        dist.all_gather(places, wanted[on.rank])
        for got, expected in zip(places, wanted):
            same(got, expected)
        whole = space((on.size * shape[0], *shape[1:]), dtype)
        dist.all_gather_into_tensor(whole, wanted[on.rank])
        same(whole, torch.cat([item.view(torch.uint8) for item in wanted]).view(dtype)
             if dtype.itemsize == 1 else torch.cat(wanted))  # fmt: skip
        matrix = [[filled(r * 3 + s, (r + 2 * s,), dtype) for s in range(on.size)] for r in range(on.size)]
        places = [space((r + 2 * on.rank,), dtype) for r in range(on.size)]
        dist.all_to_all(places, matrix[on.rank])
        for rank, got in enumerate(places):
            same(got, matrix[rank][on.rank])


def check_uneven_parts(on: Ranks) -> None:
    wanted = [filled(rank, (rank, 3), torch.float32) for rank in range(on.size)]
    places = [torch.zeros_like(item) for item in wanted]
    dist.all_gather(places, wanted[on.rank])
    for got, expected in zip(places, wanted):
        same(got, expected)
    whole = torch.zeros(on.size, 4)
    whole[on.rank] = on.rank + 1.0
    dist.all_gather_into_tensor(whole, whole[on.rank])  # in place
    same(whole, torch.arange(1.0, on.size + 1)[:, None].expand(on.size, 4))
    matrix = [[(3 * source + 5 * target) % 4 for target in range(on.size)] for source in range(on.size)]
    matrix[-1] = [0] * on.size  # one rank sends nothing at all
    send, receive = matrix[on.rank], [row[on.rank] for row in matrix]
    for shape in ((), (3,), (2, 5)):
        got = torch.full((sum(receive), *shape), -1.0)
        dist.all_to_all_single(got, filled(on.rank, (sum(send), *shape), torch.float32), receive, send)
        parts = [filled(source, (sum(row), *shape), torch.float32).split(row)[on.rank]
                 for source, row in enumerate(matrix)]  # fmt: skip
        same(got, torch.cat(parts))
    mine = torch.ones(sum(send), 2, requires_grad=True)
    moved = functional.all_to_all_single_autograd(mine, receive, send, on.ring)
    (moved * float(on.rank + 1)).sum().backward()
    factors = [float(target + 1) for target, rows in enumerate(send) for _ in range(rows)]
    same(mine.grad, torch.tensor(factors).reshape(-1, 1).expand(-1, 2))


def check_objects_and_barriers(on: Ranks) -> None:
    found = [None] * on.size
    dist.all_gather_object(found, {"rank": on.rank, "long": "x" * on.rank * 1000})
    assert [item["rank"] for item in found] == list(range(on.size))
    items = [on.rank, "a", None] if on.rank == 0 else [None] * 3
    dist.broadcast_object_list(items, 0)
    assert items == [0, "a", None]
    got = [None]
    dist.scatter_object_list(got, [[rank] for rank in range(on.size)] if on.rank == 0 else None, 0)
    assert got == [[on.rank]]
    before = on.ring._get_sequence_number_for_group()
    dist.barrier()
    dist.barrier(async_op=True).wait()
    assert on.ring._get_sequence_number_for_group() == before + 2
    on.ring.monitored_barrier(wait_all_ranks=True)
    assert dist.get_backend() == "ringcomm" and on.ring.group_name


def check_misuse_is_told(on: Ranks) -> None:
    wrong = [
        lambda: dist.all_gather_into_tensor(torch.empty(on.size * 3 + 1), torch.empty(3)),
        lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.empty(on.size * 3 + 1)),
        lambda: dist.all_to_all_single(torch.empty(2), torch.empty(2), [5] * on.size, [5] * on.size),
        lambda: dist.all_reduce(torch.empty(3), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.empty(3, dtype=torch.float8_e4m3fn)),
        lambda: dist.all_reduce(torch.empty(3, device="meta")),
    ]
    for act in wrong:
        raises((Misuse, ValueError, RuntimeError), act)
    dist.barrier()  # and the group is none the worse for it


def check_tensors_that_wrap_others(on: Ranks) -> None:
    """Each tensor inside goes through the collective; the part that a DTensor has is refused."""
    total = TwoTensor(torch.full((3,), 1.0), torch.full((3,), float(on.rank)))
    dist.all_reduce(total, group=on.ring)
    assert total.a.tolist() == [on.size] * 3 and total.b.tolist() == [sum(range(on.size))] * 3
    divided = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", list(range(on.size))), [Shard(0)])
    raises(Misuse, lambda: dist.all_reduce(divided, group=on.ring), "DTensor cannot be sent as a whole")
