"""Messages, groups, threads, futures: what happens when."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any, Dict, Sequence, Tuple

import torch
import torch.distributed as dist

from ringcomm.errors import Misuse
from tests.adapters.torch_distributed.harness import Ranks
from tests.support.errors import raises

SIZES = (0, 1, 17, 5000, 70_000, 300_000)
"""Elements of messages: some go at once, the longest wait for their receive."""


def wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def check_waiting_in_any_order(on: Ranks) -> None:
    order = random.Random(on.rank)
    for _ in range(3):
        tensors = [torch.full((1 + n * 997,), float(on.rank + n)) for n in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        sync = torch.ones(3)
        dist.all_reduce(sync)
        shuffled = order.sample(works, len(works))
        wait(shuffled)
        assert all(work.is_completed() and work.is_success() for work in works)
        for n, tensor in enumerate(tensors):
            assert bool((tensor == sum(rank + n for rank in range(on.size))).all())
        assert bool((sync == on.size).all())


def check_futures(on: Ranks) -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    chained = work.get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(chained.wait(), torch.full((3,), 2.0 * on.size))
    assert torch.equal(work.result()[0], torch.full((3,), float(on.size)))


def check_messages_of_all_types(on: Ranks) -> None:
    """All send first, then all receive: no rank may wait for its own send before it receives."""
    if on.size < 2:
        return
    right, left = (on.rank + 1) % on.size, (on.rank - 1) % on.size
    kinds = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]
    for count, kind in [(count, torch.float32) for count in SIZES] + [(9, kind) for kind in kinds]:
        got = torch.zeros(count, dtype=torch.uint8).to(kind)
        work = dist.isend((torch.arange(count) % 5 + on.rank).to(kind), right)
        assert dist.recv(got, left) == left
        work.wait()
        wanted = (torch.arange(count) % 5 + left).to(kind)
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), (count, kind)
    matrix = torch.arange(30.0).reshape(5, 6) + on.rank
    columns, transposed = torch.zeros(5, 6), torch.zeros(6, 5)
    batch = [dist.P2POp(dist.isend, item, right) for item in (matrix[:, ::2], matrix.t())]
    batch += [dist.P2POp(dist.irecv, item, left) for item in (columns[:, 1::2], transposed)]
    wait(dist.batch_isend_irecv(batch))
    wanted = torch.arange(30.0).reshape(5, 6) + left
    assert torch.equal(columns[:, 1::2], wanted[:, ::2]) and not columns[:, ::2].any()
    assert torch.equal(transposed, wanted.t())


def check_tags_and_order(on: Ranks) -> None:
    """By tag messages are received in any order, and of one tag in the order in which they were sent."""
    if on.size < 2 or on.rank > 1:
        return
    counts = [3, 200_000, 5, 100_000]
    if on.rank == 0:
        wait([dist.isend(torch.full((n,), float(tag)), 1, tag=tag) for tag, n in enumerate(counts)])
        wait([dist.isend(torch.full((n,), float(place)), 1) for place, n in enumerate(counts)])
    else:
        time.sleep(0.05)  # so that some have come before they are asked for
        for tag in (3, 0, 2, 1):
            got = torch.zeros(counts[tag])
            dist.recv(got, 0, tag=tag)
            assert bool((got == tag).all())
        places = [torch.zeros(n) for n in counts]
        wait([dist.irecv(place, 0) for place in places][::-1])
        assert [float(place[0]) for place in places] == [0, 1, 2, 3]
    for tag in (2**31, -(2**31) - 1):
        for act in (dist.isend, dist.irecv):
            raises(Misuse, partial(act, torch.ones(1), 1 - on.rank, tag=tag), "32 bits")


def check_messages_from_any_peer(on: Ranks) -> None:
    if on.rank == 0:
        seen = set()
        for count in (2, 40_000):
            for _ in range(on.size - 1):
                got = torch.zeros(count)
                source = dist.recv(got, tag=count)
                assert bool((got == source).all())
                seen.add((count, source))
        assert len(seen) == 2 * (on.size - 1)
    else:
        for count in (2, 40_000):
            dist.send(torch.full((count,), float(on.rank)), 0, tag=count)
    on.together("received")


def check_groups_beside_each_other(on: Ranks) -> None:
    """Collectives, objects and barriers of several groups, which overlap, in different order."""
    pairs: Dict[Tuple[int, int], Any] = {
        (low, high): dist.new_group([low, high], group_desc=f"{low} and {high}")
        for low in range(on.size) for high in range(low + 1, on.size)
    }  # fmt: skip
    own = [pair for pair in pairs if on.rank in pair]
    sums = [torch.full((100,), float(on.rank)) for _ in own]
    works = [dist.all_reduce(total, group=pairs[pair], async_op=True) for pair, total in zip(own, sums)]
    wait(works[::-1])  # an operation of one group does not wait for one of another
    for pair, total in zip(own, sums):
        group, found = pairs[pair], [None, None]
        assert bool((total == sum(pair)).all()) and group.group_desc == f"{pair[0]} and {pair[1]}"
        dist.all_gather_object(found, on.rank, group=group)
        assert found == list(pair)
        if on.rank == pair[1]:
            dist.send(total, pair[0], group=group)
        else:
            assert dist.recv(total, group=group) == pair[1], "its number among all ranks"
    for pair in own:
        dist.destroy_process_group(pairs[pair])
