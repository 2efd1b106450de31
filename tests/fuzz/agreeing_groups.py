"""Programs of ``torch.distributed`` from seeds; see agreeing.py."""

from __future__ import annotations

import random
from typing import Any, Tuple

import torch
import torch.distributed as dist

import ringcomm as rc
import ringcomm.torch.distributed  # noqa: F401 - it registers the backend
from tests.fuzz.agreeing_weights import delay

KINDS = (
    "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "pass_on", "reduce_scatter", "scatter",
)  # fmt: skip


class GroupFamily:
    """PyTorch's ``torch.distributed`` over ringcomm, in the group of all ranks and in smaller ones."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("ringcomm")
        size = dist.get_world_size()
        every = list(range(size))
        pairs = [[first, second] for first in every for second in every[first + 1 :]]
        self.groups = [(every, dist.group.WORLD)] + [(pair, dist.new_group(pair)) for pair in pairs]
        self.digest = 0

    def run(self, seed: int) -> int:
        """Run a program; a digest of what all ranks must have alike."""
        rng = random.Random(f"group {seed}")
        own = random.Random(f"group {seed} {rc.rank()}")  # of this rank alone
        self.digest, works = 0, []
        for number in range(rng.randrange(3, 10)):
            ranks, group = rng.choice(self.groups)
            name, later = rng.choice(KINDS), rng.random() < 0.4
            dtype = rng.choice((torch.float32, torch.float64, torch.int64, torch.int32))
            shape = (rng.choice((1, 2, 7, 400)), rng.choice((1, 5)))
            inputs = [
                torch.randint(-9, 9, (len(ranks) * shape[0], shape[1]), dtype=dtype,
                              generator=torch.Generator().manual_seed(seed * 1000 + number * 10 + rank))
                for rank in ranks
            ]  # fmt: skip
            root = rng.randrange(len(ranks))
            if rc.rank() in ranks:
                delay(own)
                works.append(_start(name, inputs, ranks, root, group, later))
                if works[-1][0] is None:
                    self._finish(works.pop())
            while works and own.random() < 0.5:
                self._finish(works.pop(0))
        for item in works:
            self._finish(item)
        return self.digest

    @staticmethod
    def _finish(item: Any) -> None:
        work, found, expected = item
        if work is not None:
            work.wait()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _start(name: str, inputs: Any, ranks: Any, root: int, group: Any, later: bool) -> Tuple[Any, Any, Any]:
    """The work, what it writes to, and what that must become."""
    me, count, at = ranks.index(rc.rank()), len(ranks), ranks[root]
    options = {"group": group, "async_op": later}
    mine = inputs[me].clone()
    every = [torch.empty_like(item) for item in inputs]
    chunks = [list(item.chunk(count)) for item in inputs]
    part = torch.empty_like(chunks[me][0])
    if name == "all_reduce":
        return dist.all_reduce(mine, **options), mine, sum(inputs)
    if name == "broadcast":
        return dist.broadcast(mine, at, **options), mine, inputs[root]
    if name == "all_gather":
        return dist.all_gather(every, mine, **options), every, inputs
    if name == "reduce_scatter":
        return dist.reduce_scatter(part, chunks[me], **options), part, sum(inputs).chunk(count)[me]
    if name == "all_to_all":
        expected = torch.cat([item[me] for item in chunks])
        return dist.all_to_all_single(every[me], mine, **options), every[me], expected
    if name == "gather":
        work = dist.gather(mine, every if me == root else None, at, **options)
        return work, every if me == root else [], inputs if me == root else []
    if name == "scatter":
        parts = [item.contiguous() for item in chunks[root]]
        return dist.scatter(part, parts if me == root else None, at, **options), part, parts[me]
    sent = dist.isend(mine, ranks[(me + 1) % count], group=group)
    dist.irecv(every[me], ranks[me - 1], group=group).wait()
    sent.wait()
    return None, every[me], inputs[me - 1]
