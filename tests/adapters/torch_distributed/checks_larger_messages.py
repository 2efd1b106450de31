"""The operations that divided models use: batches of messages, uneven exchanges, groups, autograd."""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor

from ringcomm.errors import Misuse
from tests.adapters.torch_distributed.harness import Ranks
from tests.support.errors import raises

SIZES = (0, 1, 17, 5000, 70_000)
"""Elements of messages: some go at once, the last one waits for its receive."""


def message(source: int, target: int, number: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * source + 100 * target + number


def check_batches_of_messages_in_any_order(on: Ranks) -> None:
    """Only the order of messages of one pair and direction counts; each rank shuffles the rest its way."""
    for round_number in range(6):
        queues: List[List[Any]] = []
        expected: List[Tuple[torch.Tensor, torch.Tensor]] = []
        for peer in set(range(on.size)) - {on.rank}:
            counts = [SIZES[(number + round_number) % len(SIZES)] for number in range(3)]
            sends = [message(on.rank, peer, number, count) for number, count in enumerate(counts)]
            queues.append([dist.P2POp(dist.isend, item, peer, on.ring) for item in sends])
            wanted = [message(peer, on.rank, number, count) for number, count in enumerate(counts)]
            places = [torch.full_like(item, -1.0) for item in wanted]
            queues.append([dist.P2POp(dist.irecv, item, peer, on.ring) for item in places])
            expected += zip(places, wanted)
        chance, batch = random.Random(10 * round_number + on.rank), []
        while queues:
            queue = chance.choice(queues)
            batch.append(queue.pop(0))
            queues = [item for item in queues if item]
        works = dist.batch_isend_irecv(batch)
        chance.shuffle(works)
        for work in works:
            work.wait()
        for place, wanted_item in expected:
            assert torch.equal(place, wanted_item)


def check_messages_of_several_threads(on: Ranks) -> None:
    """Some threads wait at once, some look now and then, some sleep first: any may move the messages."""
    problems: List[BaseException] = []

    def exchange(thread: int) -> None:
        for step in range(12):
            chosen = random.Random(1000 * thread + step)  # the same on all ranks
            pending: List[Tuple[Any, torch.Tensor, torch.Tensor]] = []
            for number in range(chosen.randint(1, 4)):
                source, target = chosen.sample(range(on.size), 2)
                tag, count = 10_000 * thread + 10 * step + number, chosen.choice((*SIZES, 300_000))
                content = message(source, target, tag, count)
                if source == on.rank:
                    pending.append((dist.isend(content, target, on.ring, tag), content, content))
                elif target == on.rank:
                    place = torch.full_like(content, -1.0)
                    pending.append((dist.irecv(place, source, on.ring, tag), place, content))
            own = random.Random(1000 * thread + 10 * step + on.rank)
            own.shuffle(pending)
            for work, place, content in pending:
                way = own.randrange(3)
                while way == 1 and not work.is_completed():
                    time.sleep(1e-4)
                time.sleep(0.004 * (way == 2))
                work.wait()
                assert torch.equal(place, content), (thread, step)

    def run(thread: int) -> None:
        try:
            exchange(thread)
        except BaseException as problem:  # noqa: BLE001 - raised below
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3 * (on.size > 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def check_a_ring_of_long_messages(on: Ranks) -> None:
    """All send first, then all receive: no rank may wait for its own send before it receives."""
    right, left = (on.rank + 1) % on.size, (on.rank - 1) % on.size
    for order in (1, -1):
        long = torch.full((400_000,), float(on.rank))
        got = torch.empty(400_000)
        batch = [dist.P2POp(dist.isend, long, right), dist.P2POp(dist.irecv, got, left)][::order]
        for work in dist.batch_isend_irecv(batch)[::-1]:
            work.wait()
        assert bool((got == left).all())


def check_messages_with_tags_in_reverse(on: Ranks) -> None:
    if on.rank == 0:
        works = [dist.isend(torch.full((3 + tag,), float(tag)), 1, on.ring, tag) for tag in range(5)]
    elif on.rank == 1:
        places = [torch.empty(3 + tag) for tag in range(5)]
        works = [dist.irecv(places[tag], 0, on.ring, tag) for tag in reversed(range(5))]
    else:
        works = []
    for work in works:
        work.wait()
    if on.rank == 1:
        assert [item.tolist() for item in places] == [[float(tag)] * (3 + tag) for tag in range(5)]


def check_strided_and_byte_messages(on: Ranks) -> None:
    """Columns of a matrix, transposed matrices, and 8-bit floats, which are moved as their bytes."""
    right, left = (on.rank + 1) % on.size, (on.rank - 1) % on.size
    matrix = torch.arange(30.0).reshape(5, 6) + on.rank
    columns, transposed = torch.zeros(5, 6), torch.zeros(6, 5)
    small = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
    numbers = [(torch.arange(9) % 5 + on.rank).float().to(kind) for kind in small]
    places = [torch.zeros(9, dtype=torch.uint8).view(kind) for kind in small]
    sent = [matrix[:, ::2], matrix.t(), *numbers, numbers[0].view(torch.uint8)]
    taken = [columns[:, 1::2], transposed, *places, torch.zeros(9, dtype=torch.uint8)]
    batch = [dist.P2POp(dist.isend, item, right) for item in sent]
    batch += [dist.P2POp(dist.irecv, item, left) for item in taken]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    wanted = torch.arange(30.0).reshape(5, 6) + left
    assert torch.equal(columns[:, 1::2], wanted[:, ::2]) and not columns[:, ::2].any()
    assert torch.equal(transposed, wanted.t())
    for place, kind in zip(places, small):
        assert torch.equal(place.float(), (torch.arange(9) % 5 + left).float().to(kind).float())
    assert torch.equal(taken[-1].view(small[0]).float(), places[0].float())


def check_collectives_of_bytes(on: Ranks) -> None:
    """8-bit floats as FSDP2 and tensor parallelism move them: gathered, exchanged, as views of bytes."""
    mine = (torch.arange(8) % 7 + on.rank).float().to(torch.float8_e4m3fn)
    whole = torch.zeros(8 * on.size, dtype=torch.uint8)
    dist.all_gather_into_tensor(whole, mine.view(torch.uint8), on.ring)
    wanted = torch.cat([(torch.arange(8) % 7 + rank).float() for rank in range(on.size)])
    assert torch.equal(whole.view(torch.float8_e4m3fn).float(), wanted)
    typed = torch.zeros(8 * on.size, dtype=torch.uint8).view(torch.float8_e4m3fn)
    dist.all_gather_into_tensor(typed, mine, on.ring)
    assert torch.equal(typed.float(), wanted)
    gathered = functional.all_gather_tensor(mine, 0, on.ring)
    assert torch.equal(functional.wait_tensor(gathered).float(), wanted)


def check_tensors_that_wrap_others(on: Ranks) -> None:
    """Each tensor inside goes through the collective; the part that a DTensor has is refused."""

    def two(first: float, second: float) -> TwoTensor:
        return TwoTensor(torch.full((3,), float(first)), torch.full((3,), float(second)))

    total = two(1.0, on.rank)
    dist.all_reduce(total, group=on.ring)
    assert total.a.tolist() == [on.size] * 3 and total.b.tolist() == [sum(range(on.size))] * 3
    part = two(0.0, 0.0)
    pieces = [two(rank, -rank) for rank in range(on.size)] if on.rank == 1 else None
    dist.scatter(part, pieces, src=1, group=on.ring, async_op=True).wait()
    assert part.a.tolist() == [on.rank] * 3 and part.b.tolist() == [-on.rank] * 3
    mesh = DeviceMesh("cpu", list(range(on.size)))
    divided = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    raises(Misuse, lambda: dist.all_reduce(divided, group=on.ring), "DTensor cannot be sent as a whole")


def check_collectives_are_counted(on: Ranks) -> None:
    """PyTorch's ``CommDebugMode`` sees those that are called in Python, and functional ones once."""
    whole, part = torch.zeros(2 * on.size), torch.ones(2)
    with CommDebugMode() as mode:
        dist.all_gather_into_tensor(whole, part, on.ring)
        dist.all_gather([torch.empty(2) for _ in range(on.size)], part, on.ring)
        dist.reduce_scatter_tensor(part, whole, group=on.ring)
        dist.all_reduce(part, group=on.ring)
        functional.all_reduce(part, "sum", on.ring).sum()
    ops = torch.ops.c10d
    names = [ops._allgather_base_, ops.allgather_, ops._reduce_scatter_base_, ops.allreduce_]
    assert [mode.get_comm_counts()[name] for name in names] == [1, 1, 1, 1]
    assert mode.get_total_counts() == 5


def check_a_functional_gather_into_a_given_tensor(on: Ranks) -> None:
    for group in (on.ring, on.gloo):
        whole = torch.zeros(2 * on.size)
        gather = torch.ops._c10d_functional.all_gather_into_tensor_out
        got = gather(torch.full((2,), float(on.rank)), on.size, group.group_name, out=whole)
        functional.wait_tensor(got)
        assert whole.tolist() == [float(rank) for rank in range(on.size) for _ in range(2)]


def check_coalesced_operations(on: Ranks) -> None:
    """Blocks of collectives and of messages: one work, or one wait at the end of the block."""
    sums = [torch.full((count,), float(on.rank + 1)) for count in (3, 1, 70_000)]
    with dist._coalescing_manager(on.ring, async_ops=True) as together:
        for item in sums:
            dist.all_reduce(item, group=on.ring)
    together.wait()
    assert all(bool((item == sum(range(1, on.size + 1))).all()) for item in sums)
    outputs = [torch.empty(4), torch.empty(9)]
    sources = [torch.arange(float(item.numel() * on.size)) for item in outputs]
    with dist._coalescing_manager(on.ring):
        for output, source in zip(outputs, sources):
            dist.reduce_scatter_tensor(output, source, group=on.ring)
    for output, source in zip(outputs, sources):
        assert torch.equal(output, source.chunk(on.size)[on.rank] * on.size)


def splits(size: int) -> List[List[int]]:
    """The rows that each rank sends to each; some send none, and one sends nothing at all."""
    matrix = [[(3 * source + 5 * target) % 4 for target in range(size)] for source in range(size)]
    matrix[-1] = [0] * size
    return matrix


def check_uneven_exchanges(on: Ranks) -> None:
    matrix = splits(on.size)
    send, receive = matrix[on.rank], [row[on.rank] for row in matrix]
    for shape in ((), (3,), (2, 5)):
        mine = torch.randn(sum(send), *shape, generator=torch.Generator().manual_seed(on.rank))
        got = torch.full((sum(receive), *shape), -1.0)
        dist.all_to_all_single(got, mine, receive, send, group=on.ring)
        parts = []
        for source, row in enumerate(matrix):
            theirs = torch.randn(sum(row), *shape, generator=torch.Generator().manual_seed(source))
            parts.append(theirs.split(row)[on.rank])
        assert torch.equal(got, torch.cat(parts))


def check_gradients_go_through_functional_collectives(on: Ranks) -> None:
    """The derivative of each collective is the collective that moves the gradients back."""
    matrix = splits(on.size)
    send, receive = matrix[on.rank], [row[on.rank] for row in matrix]
    mine = torch.ones(sum(send), 2, requires_grad=True)
    weight = float(on.rank + 1)
    (functional.all_to_all_single_autograd(mine, receive, send, on.ring) * weight).sum().backward()
    factors = [float(target + 1) for target, rows in enumerate(send) for _ in range(rows)]
    assert torch.equal(mine.grad, torch.tensor(factors).reshape(-1, 1).expand(-1, 2))
    part = torch.ones(3, 2, requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(part, 0, on.ring)
    (gathered * weight).sum().backward()
    total = sum(range(1, on.size + 1))
    assert torch.equal(part.grad, torch.full((3, 2), float(total)))
    whole = torch.ones(2, 3 * on.size, requires_grad=True)
    reduced = functional.reduce_scatter_tensor_autograd(whole, "sum", 1, on.ring)
    (reduced * weight).sum().backward()
    wanted = torch.arange(1.0, on.size + 1).repeat_interleave(3).expand(2, -1)
    assert torch.equal(whole.grad, wanted)


def check_groups_beside_each_other(on: Ranks) -> None:
    """Objects, barriers and collectives of several groups, which overlap, in different order."""
    pairs: Dict[Tuple[int, int], Any] = {}
    for low in range(on.size):
        for high in range(low + 1, on.size):
            pairs[low, high] = dist.new_group([low, high])
    own = [pair for pair in pairs if on.rank in pair]
    works, sums = [], []
    for pair in own:
        sums.append(torch.full((100,), float(on.rank)))
        works.append(dist.all_reduce(sums[-1], group=pairs[pair], async_op=True))
    for work in reversed(works):  # an operation of one group does not wait for one of another
        work.wait()
    for pair, total in zip(own, sums):
        assert bool((total == sum(pair)).all())
    for pair in own:
        group, found = pairs[pair], [None, None]
        dist.all_gather_object(found, {"rank": on.rank}, group=group)
        assert found == [{"rank": pair[0]}, {"rank": pair[1]}]
        item = [on.rank]
        dist.broadcast_object_list(item, src=pair[1], group=group)
        assert item == [pair[1]]
        dist.barrier(group)
        dist.barrier(group, async_op=True).wait()
    for pair in own:
        dist.destroy_process_group(pairs[pair])


def check_groups_are_split_by_new_group(on: Ranks) -> None:
    """PyTorch refuses ``split_group`` without an accelerator; these give what it would."""
    parts, own = [[0], list(range(1, on.size))], None
    raises(RuntimeError, lambda: dist.split_group(on.ring, parts), "No device associated with the default pg")
    for ranks in parts:
        group = dist.new_group(ranks)
        own = group if on.rank in ranks else own
    total = torch.ones(3)
    dist.all_reduce(total, group=own)
    assert total.tolist() == [1.0 if on.rank == 0 else on.size - 1.0] * 3
    mine, groups = dist.new_subgroups_by_enumeration(parts)
    assert dist.get_world_size(mine) == (1 if on.rank == 0 else on.size - 1) and len(groups) == 2
