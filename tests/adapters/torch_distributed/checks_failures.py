"""What ranks are told when something goes wrong. The last check does not let every rank live."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist

from ringcomm.errors import MismatchError, Misuse, PeerLostError, PeerStalledError
from tests.adapters.torch_distributed.harness import Ranks
from tests.support.errors import raises


def lost(rank: int, act: Callable[[], Any], text: str = "", kind: Any = PeerLostError) -> Any:
    """The error about this rank, with this text, that a call raises."""
    error = raises(kind, act, text)
    assert error.rank == rank, error
    return error


def check_different_calls(on: Ranks) -> None:
    group = dist.new_group()
    tensor = torch.ones(5)
    if on.rank == 1:
        error = raises(MismatchError, lambda: dist.broadcast(tensor, 0, group=group), "allreduce")
    else:
        error = raises(MismatchError, lambda: dist.all_reduce(tensor, group=group), "allreduce")
    assert "broadcast" in str(error), error
    raises(Misuse, lambda: dist.barrier(group=group))
    assert isinstance(group.failure, MismatchError)
    dist.destroy_process_group(group)
    dist.barrier()  # another group is none the worse for it


def full(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=torch.uint8).to(dtype)


def each(group: Any, n: int) -> List[torch.Tensor]:
    """A tensor for each rank."""
    return [full(n) for _ in range(group.size())]


def uneven(group: Any, odd: bool, n: int) -> List[torch.Tensor]:
    """Tensors for each rank with the same sum of sizes, in another order on the rank that differs."""
    return [full(n + 2 * odd), full(n + 2 * (not odd)), *each(group, n)[2:]]


def gather(group: Any, n: int, mine: int) -> None:
    """By the group's own method: ``dist.gather`` checks sizes on each rank before."""
    places, options = ([each(group, n)] if group.rank() == 0 else []), dist.GatherOptions()
    options.rootRank = 0
    group.gather(places, [full(mine)], options).wait()


def message(group: Any, odd: bool, theirs: torch.Tensor, n: int) -> None:
    """Rank 1 sends `theirs` to rank 0, which receives n elements of float32."""
    if odd:
        dist.send(theirs, dist.get_global_rank(group, 0), group=group)
    elif group.rank() == 0:
        dist.recv(full(n), dist.get_global_rank(group, 1), group=group)


OP = dist.ReduceOp
COUNTS = (3, 120_001)
"""Elements of tensors: every second case is long."""
DISAGREEMENTS: Dict[str, Callable[[Any, bool, int], Any]] = {
    "allreduce(;Sum;Max": lambda group, odd, n: dist.all_reduce(full(n), OP.MAX if odd else OP.SUM, group),
    "float32;float64": lambda group, odd, n: dist.all_reduce(
        full(n, torch.float64 if odd else torch.float32), group=group),
    "allreduce(;number of elements": lambda group, odd, n: dist.all_reduce(full(n + odd), group=group),
    "allreduce(;sparse": lambda group, odd, n: dist.all_reduce(
        full(n).to_sparse() if odd else full(n), group=group),
    "allreduce(": lambda group, odd, n: dist.all_reduce_coalesced(
        [full(n + 1 - odd), full(n + odd)], group=group),
    "root_rank=0;root_rank=1": lambda group, odd, n: dist.reduce(full(n), int(odd), group=group),
    "reducescatter(;sizes [": lambda group, odd, n: dist.reduce_scatter(
        torch.zeros_like(uneven(group, odd, n)[group.rank()]), uneven(group, odd, n), group=group),
    "allgather(;sizes [": lambda group, odd, n: dist.all_gather(
        uneven(group, odd, n), torch.zeros_like(uneven(group, odd, n)[group.rank()]), group=group),
    "gather(;elements": lambda group, odd, n: gather(group, n, n - odd),
    "scatter(;elements": lambda group, odd, n: dist.scatter(
        full(n - odd), each(group, n) if group.rank() == 0 else None, 0, group=group),
    "alltoall(;elements": lambda group, odd, n: group.alltoall(
        each(group, n), [full(n - odd), *each(group, n)[1:]]).wait(),
    "recv(;send(;bytes": lambda group, odd, n: message(group, odd, full(n + 1), n),
    "float32;int32": lambda group, odd, n: message(group, odd, full(n, torch.int32), n),
}  # fmt: skip
"""Calls that differ in one respect on rank 1, by the words of which the error must have each."""


def check_ranks_that_disagree_are_told_the_same(on: Ranks) -> None:
    """Each case in a group of its own, which ends with it, and all at once: they mostly wait."""
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in DISAGREEMENTS]

    def told(number: int, act: Callable[[Any, bool, int], Any]) -> str:
        def call() -> None:
            act(groups[number], on.rank == 1, COUNTS[number % 2])
            dist.barrier(group=groups[number])  # a rank whose own part was right may learn at the next call

        return str(raises(MismatchError, call))

    with ThreadPoolExecutor(len(groups)) as pool:
        mine = list(pool.map(told, range(len(groups)), DISAGREEMENTS.values()))
    found: List[Any] = [None] * on.size
    dist.all_gather_object(found, mine)
    assert found == [mine] * on.size
    for words, text in zip(DISAGREEMENTS, mine):
        assert all(word in text for word in [*words.split(";"), f"{__file__}:"]), (words, text)
    for group in groups:
        dist.destroy_process_group(group)


def check_leaving_too_early(on: Ranks) -> None:
    group = dist.new_group()
    if on.rank == 1:
        dist.destroy_process_group(group)
    else:
        lost(1, lambda: dist.all_reduce(torch.ones(3), group=group), "destroy_process_group()")
        dist.destroy_process_group(group)
    dist.barrier()


def check_a_silent_rank(on: Ranks) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if on.rank == 2:
        on.together("judged")
    else:
        started = time.perf_counter()
        lost(2, lambda: dist.all_reduce(torch.ones(3), group=group), kind=PeerStalledError)
        assert time.perf_counter() - started > 0.9
        on.together("judged")
    dist.destroy_process_group(group)


def check_a_killed_rank(on: Ranks) -> None:
    """In a collective, in a message, in a smaller group, and in DDP's backward pass."""
    from torch.nn.parallel import DistributedDataParallel

    last = on.size - 1
    small, messages = dist.new_group([1, last]), dist.new_group()
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=dist.new_group())
    dist.barrier()
    if on.rank == last:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    error = lost(last, lambda: dist.all_reduce(torch.ones(100_000)), "allreduce")
    assert f"rank {last} " in str(error), error
    if on.rank == 1:
        lost(last, lambda: dist.all_reduce(torch.ones(3), group=small), f"rank {last} of all")
    lost(last, lambda: dist.recv(torch.ones(3), last, group=messages))
    error = raises(Exception, lambda: model(torch.ones(2, 4)).sum().backward(), "PeerLostError")
    assert f"rank {last} " in str(error), error
    assert isinstance(model.process_group.failure, PeerLostError)
