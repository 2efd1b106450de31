"""What ranks are told when something goes wrong. The last check does not let every rank live."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any, Callable

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
