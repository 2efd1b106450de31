"""Programs of ``torch.distributed`` from seeds; see agreeing.py."""

from __future__ import annotations

import random
import time
from typing import Any, Callable, Dict

import ringcomm as rc


def delay(rng: random.Random) -> None:
    """Now and then, wait for a few milliseconds."""
    if rng.random() < 0.1:
        time.sleep(rng.uniform(0.0, 0.004))


class GroupFamily:
    """PyTorch's ``torch.distributed`` over ringcomm, in the group of all ranks and in smaller ones."""

    def __init__(self) -> None:
        import torch.distributed as dist

        import ringcomm.torch.distributed  # noqa: F401 - it registers the backend

        if not dist.is_initialized():
            dist.init_process_group("ringcomm")
        size = dist.get_world_size()
        every = list(range(size))
        pairs = [[first, second] for first in every for second in every[first + 1 :]]
        self.groups = [(every, dist.group.WORLD)] + [(pair, dist.new_group(pair)) for pair in pairs]
        self.digest = 0

    def run(self, seed: int) -> int:
        """Run a program; a digest of what all ranks must have alike."""
        import torch

        rng = random.Random(f"group {seed}")
        own = random.Random(f"group {seed} {rc.rank()}")  # of this rank alone
        self.digest, works = 0, []
        for number in range(rng.randrange(3, 10)):
            ranks, group = rng.choice(self.groups)
            name, later = rng.choice(sorted(_GROUP_STEPS)), rng.random() < 0.4
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
                work, check = _GROUP_STEPS[name](inputs, ranks, ranks.index(rc.rank()), root, group, later)
                if work is None:
                    check()
                else:
                    works.append((work, check))
            while works and own.random() < 0.5:
                self._finish(works.pop(0))
        for item in works:
            self._finish(item)
        return self.digest

    @staticmethod
    def _finish(item: Any) -> None:
        work, check = item
        work.wait()
        check()


def _equal(one: Any, other: Any) -> None:
    import torch

    torch.testing.assert_close(one, other, rtol=0, atol=0)


def _all_reduce(inputs: Any, ranks: Any, me: int, root: int, group: Any, later: bool) -> Any:
    import torch.distributed as dist

    mine = inputs[me].clone()
    work = dist.all_reduce(mine, group=group, async_op=later)
    return work, lambda: _equal(mine, sum(inputs))


def _broadcast(inputs: Any, ranks: Any, me: int, root: int, group: Any, later: bool) -> Any:
    import torch.distributed as dist

    mine = inputs[me].clone()
    work = dist.broadcast(mine, ranks[root], group=group, async_op=later)
    return work, lambda: _equal(mine, inputs[root])


def _all_gather(inputs: Any, ranks: Any, me: int, root: int, group: Any, later: bool) -> Any:
    import torch
    import torch.distributed as dist

    found = [torch.empty_like(item) for item in inputs]
    work = dist.all_gather(found, inputs[me], group=group, async_op=later)
    return work, lambda: [_equal(*pair) for pair in zip(found, inputs)]


def _reduce_scatter(inputs: Any, ranks: Any, me: int, root: int, group: Any, later: bool) -> Any:
    import torch
    import torch.distributed as dist

    found = torch.empty_like(inputs[me].chunk(len(ranks))[0])
    work = dist.reduce_scatter(found, list(inputs[me].chunk(len(ranks))), group=group, async_op=later)
    return work, lambda: _equal(found, sum(inputs).chunk(len(ranks))[me])


def _all_to_all(inputs: Any, ranks: Any, me: int, root: int, group: Any, later: bool) -> Any:
    import torch
    import torch.distributed as dist

    found = torch.empty_like(inputs[me])
    work = dist.all_to_all_single(found, inputs[me], group=group, async_op=later)
    return work, lambda: _equal(found, torch.cat([item.chunk(len(ranks))[me] for item in inputs]))


def _gather(inputs: Any, ranks: Any, me: int, root: int, group: Any, later: bool) -> Any:
    import torch
    import torch.distributed as dist

    found = [torch.empty_like(item) for item in inputs] if me == root else None
    work = dist.gather(inputs[me], found, ranks[root], group=group, async_op=later)
    return work, lambda: None if found is None else [_equal(*pair) for pair in zip(found, inputs)]


def _scatter(inputs: Any, ranks: Any, me: int, root: int, group: Any, later: bool) -> Any:
    import torch
    import torch.distributed as dist

    parts = [part.contiguous() for part in inputs[root].chunk(len(ranks))]
    found = torch.empty_like(parts[0])
    work = dist.scatter(found, parts if me == root else None, ranks[root], group=group, async_op=later)
    return work, lambda: _equal(found, parts[me])


def _pass_on(inputs: Any, ranks: Any, me: int, root: int, group: Any, later: bool) -> Any:
    import torch
    import torch.distributed as dist

    found = torch.empty_like(inputs[me])
    left, right = ranks[me - 1], ranks[(me + 1) % len(ranks)]
    sent = dist.isend(inputs[me], right, group=group)
    dist.irecv(found, left, group=group).wait()
    sent.wait()
    return None, lambda: _equal(found, inputs[me - 1])


_GROUP_STEPS: Dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather, "all_reduce": _all_reduce, "all_to_all": _all_to_all, "broadcast": _broadcast,
    "gather": _gather, "pass_on": _pass_on, "reduce_scatter": _reduce_scatter, "scatter": _scatter,
}  # fmt: skip
