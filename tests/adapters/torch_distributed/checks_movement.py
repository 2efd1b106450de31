"""What moves tensors: over ringcomm, and what must come of it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.adapters.torch_distributed.harness import Ranks
from tests.support.errors import raises

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def filled(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose values show its rank."""
    count = 1
    for length in shape:
        count *= length
    return ((torch.arange(count) % 3 + rank) % 5).reshape(shape).to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert torch.equal(
        got.float() if got.itemsize == 1 else got, wanted.float() if got.itemsize == 1 else wanted
    )


def types_and_shapes(*shapes: tuple[int, ...]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Each type with one shape, and each of these shapes with one type."""
    return [(dtype, (3, 2)) for dtype in DTYPES] + [(torch.float32, shape) for shape in shapes]


def check_broadcast(on: Ranks) -> None:
    for dtype, shape in types_and_shapes((0,), (), (300, 300)):
        for root in range(on.size):
            mine = filled(on.rank, shape, dtype)
            dist.broadcast(mine, root)
            same(mine, filled(root, shape, dtype))


def check_all_gather(on: Ranks) -> None:
    for dtype, shape in types_and_shapes((0,), (1,), (200, 200)):
        wanted = [filled(rank, shape, dtype) for rank in range(on.size)]
        places = [torch.zeros(shape, dtype=torch.uint8).to(dtype) for _ in wanted]
        dist.all_gather(places, wanted[on.rank])
        for got, expected in zip(places, wanted):
            same(got, expected)
        whole = torch.zeros((on.size * shape[0], *shape[1:]), dtype=torch.uint8).to(dtype)
        dist.all_gather_into_tensor(whole, wanted[on.rank])
        same(whole, torch.cat([item.view(torch.uint8) for item in wanted]).view(dtype)
             if dtype.itemsize == 1 else torch.cat(wanted))  # fmt: skip


def check_all_gather_in_place_and_stacked(on: Ranks) -> None:
    whole = torch.zeros(on.size, 4)
    whole[on.rank] = on.rank + 1.0
    dist.all_gather_into_tensor(whole, whole[on.rank])
    same(whole, torch.arange(1.0, on.size + 1)[:, None].expand(on.size, 4))


def check_uneven_all_gather(on: Ranks) -> None:
    wanted = [filled(rank, (rank, 3), torch.float32) for rank in range(on.size)]
    places = [torch.zeros_like(item) for item in wanted]
    dist.all_gather(places, wanted[on.rank])
    for got, expected in zip(places, wanted):
        same(got, expected)


def check_coalesced_gathers(on: Ranks) -> None:
    outputs = [torch.empty(2 * on.size), torch.empty(3 * on.size)]
    inputs = [torch.full((2,), float(on.rank)), torch.full((3,), float(on.rank))]
    with dist._coalescing_manager(on.ring):
        for output, source in zip(outputs, inputs):
            dist.all_gather_into_tensor(output, source)
    same(outputs[0], torch.arange(float(on.size)).repeat_interleave(2))
    same(outputs[1], torch.arange(float(on.size)).repeat_interleave(3))
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(on.size)]
    on.ring.allgather_coalesced(lists, inputs).wait()
    for rank, (two, three) in enumerate(lists):
        same(two, torch.full((2,), float(rank)))
        same(three, torch.full((3,), float(rank)))


def check_gather_and_scatter(on: Ranks) -> None:
    for dtype in DTYPES:
        for root in range(on.size):
            wanted = [filled(rank, (5, 2), dtype) for rank in range(on.size)]
            at_root = on.rank == root
            places = [torch.zeros(5, 2, dtype=torch.uint8).to(dtype) for _ in wanted] if at_root else None
            dist.gather(wanted[on.rank], places, root)
            for got, expected in zip(places or [], wanted):
                same(got, expected)
            got = torch.zeros(5, 2, dtype=torch.uint8).to(dtype)
            dist.scatter(got, wanted if at_root else None, root)
            same(got, wanted[on.rank])


def check_all_to_all(on: Ranks) -> None:
    for dtype in DTYPES:
        matrix = [[filled(r * 3 + s, (r + 2 * s,), dtype) for s in range(on.size)] for r in range(on.size)]
        places = [torch.zeros(r + 2 * on.rank, dtype=torch.uint8).to(dtype) for r in range(on.size)]
        dist.all_to_all(places, matrix[on.rank])
        for rank, got in enumerate(places):
            same(got, matrix[rank][on.rank])
        even = filled(on.rank, (on.size * 2, 3), dtype)
        got = torch.zeros(on.size * 2, 3, dtype=torch.uint8).to(dtype)
        dist.all_to_all_single(got, even)
        for rank in range(on.size):
            sent = filled(rank, (on.size * 2, 3), dtype)[2 * on.rank : 2 * on.rank + 2]
            same(got[2 * rank : 2 * rank + 2], sent)


def check_all_to_all_with_splits(on: Ranks) -> None:
    send = [(on.rank + peer) % 3 for peer in range(on.size)]
    mine = torch.full((sum(send), 2), float(on.rank))
    got = torch.empty(sum(send), 2)  # (r + s) % 3 is symmetric
    dist.all_to_all_single(got, mine, send, send)
    same(got, torch.cat([torch.full((count, 2), float(peer)) for peer, count in enumerate(send)]))


def check_objects(on: Ranks) -> None:
    found = [None] * on.size
    dist.all_gather_object(found, {"rank": on.rank, "long": "x" * on.rank * 1000})
    assert [item["rank"] for item in found] == list(range(on.size))
    items = [on.rank, "a", None] if on.rank == 0 else [None] * 3
    dist.broadcast_object_list(items, 0)
    assert items == [0, "a", None]
    places = [None] * on.size if on.rank == 0 else None
    dist.gather_object((on.rank,), places, 0)
    assert places == ([(rank,) for rank in range(on.size)] if on.rank == 0 else None)
    got = [None]
    dist.scatter_object_list(got, [[rank] for rank in range(on.size)] if on.rank == 0 else None, 0)
    assert got == [[on.rank]]
    if on.size > 1 and on.rank < 2:
        if on.rank == 0:
            dist.send_object_list([1, {"two": 2}], 1)
        else:
            both = [None, None]
            dist.recv_object_list(both, 0)
            assert both == [1, {"two": 2}]


def check_barriers(on: Ranks) -> None:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    on.ring.monitored_barrier()
    on.ring.monitored_barrier(wait_all_ranks=True)


def check_misuse_is_told(on: Ranks) -> None:
    from ringcomm.errors import Misuse

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


def check_functional_collectives(on: Ranks) -> None:
    import torch.distributed._functional_collectives as functional

    mine = torch.full((4,), float(on.rank))
    total = float(sum(range(on.size)))
    same(functional.all_reduce(mine, "sum", on.ring) + 0, torch.full((4,), total))
    both = functional.all_reduce_coalesced([mine, mine * 2], "sum", on.ring)
    same(both[0] + 0, torch.full((4,), total))
    same(both[1] + 0, torch.full((4,), 2 * total))
    gathered = functional.all_gather_tensor(mine, 0, on.ring) + 0
    same(gathered, torch.arange(float(on.size)).repeat_interleave(4))
    whole = torch.arange(4.0 * on.size)
    same(functional.reduce_scatter_tensor(whole, "sum", 0, on.ring) + 0,
         whole[4 * on.rank : 4 * on.rank + 4] * on.size)  # fmt: skip
    same(functional.broadcast(mine, 0, on.ring) + 0, torch.zeros(4))
    same(functional.all_to_all_single(whole, None, None, on.ring) + 0,
         torch.arange(4.0 * on.rank, 4.0 * on.rank + 4).repeat(on.size))  # fmt: skip
