"""What ranks are told when something goes wrong. The last check does not let every rank live."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ringcomm.errors import MismatchError, Misuse, NotInitializedError, PeerLostError, PeerStalledError
from ringcomm.group.message_channel import SHORT_BYTES
from tests.adapters.torch_distributed.harness import Ranks

LONG = SHORT_BYTES // 2
"""Elements of a message that waits for its receive."""


def failure_of(act: object) -> Exception:
    """Return what it raises."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return error
    raise AssertionError("it went well")


def check_different_calls(on: Ranks) -> None:
    group = dist.new_group()
    tensor = torch.ones(5)
    if on.rank == 1:
        error = failure_of(lambda: dist.broadcast(tensor, 0, group=group))
    else:
        error = failure_of(lambda: dist.all_reduce(tensor, group=group))
    assert isinstance(error, MismatchError), error
    assert "allreduce" in str(error) and "broadcast" in str(error), error
    assert isinstance(failure_of(lambda: dist.barrier(group=group)), Misuse)
    assert isinstance(group.failure, MismatchError)
    dist.destroy_process_group(group)
    dist.barrier()  # another group is none the worse for it


def check_abort(on: Ranks) -> None:
    group = dist.new_group()
    if on.rank == 1:
        work = dist.irecv(torch.zeros(1), 0, group=group)
        threading.Timer(0.2, group.abort).start()
        error = failure_of(work.wait)
        assert isinstance(error, NotInitializedError) and "abort()" in str(error), error
        error = failure_of(lambda: dist.barrier(group=group))
        assert isinstance(error, NotInitializedError), error
    else:
        error = failure_of(lambda: dist.all_reduce(torch.ones(3), group=group))
        assert isinstance(error, PeerLostError) and error.rank == 1 and "abort()" in str(error), error
    dist.destroy_process_group(group)
    dist.barrier()


def check_leaving_too_early(on: Ranks) -> None:
    group = dist.new_group()
    if on.rank == 1:
        dist.destroy_process_group(group)
    else:
        error = failure_of(lambda: dist.all_reduce(torch.ones(3), group=group))
        assert isinstance(error, PeerLostError) and error.rank == 1, error
        assert "destroy_process_group()" in str(error), error
        dist.destroy_process_group(group)
    dist.barrier()


def check_a_rank_that_does_not_come_to_a_monitored_barrier(on: Ranks) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if on.rank == 2:
        on.together("judged")
    else:
        error = failure_of(lambda: group.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True))
        assert isinstance(error, PeerStalledError) and error.rank == 2, error
        assert ("rank 2 (" if on.rank else "Rank 2 failed to pass monitoredBarrier") in str(error)
        on.together("judged")
    dist.destroy_process_group(group)


def check_a_silent_rank(on: Ranks) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if on.rank == 2:
        on.together("judged")
    else:
        started = time.perf_counter()
        error = failure_of(lambda: dist.all_reduce(torch.ones(3), group=group))
        assert isinstance(error, PeerStalledError) and error.rank == 2, error
        assert time.perf_counter() - started > 0.9
        on.together("judged")
    dist.destroy_process_group(group)


def check_messages_whose_time_is_over(on: Ranks) -> None:
    """The peer lives, but neither sends nor receives: the wait ends, and all ranks are told the same."""
    ways = {
        "a receive": lambda group: [dist.irecv(torch.zeros(1), 1, group=group)],
        "a long send": lambda group: [dist.isend(torch.zeros(LONG), 1, group=group)],
        "a batch": lambda group: dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.zeros(LONG), 1, group),
                dist.P2POp(dist.irecv, torch.zeros(LONG), 1, group),
            ]
        ),
    }
    for name, start in ways.items():
        group = dist.new_group(timeout=timedelta(seconds=1))
        texts = []
        if on.rank == 0:
            works = start(group)
            for work in works:
                error = failure_of(work.wait)
                assert isinstance(error, PeerStalledError) and error.rank == 1, (name, error)
                texts.append(str(error))
            assert "not done within 1 s" in texts[0] and "tag 0" in texts[0], (name, texts)
            on.store.set(name, texts[0])
        told = on.store.get(name).decode()
        error = failure_of(partial(dist.barrier, group=group))
        assert told in str(error) and set(texts) <= {told}, (name, error, texts)
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
    error = failure_of(lambda: dist.all_reduce(torch.ones(100_000)))
    assert isinstance(error, PeerLostError) and error.rank == last, error
    assert f"rank {last} " in str(error) and "allreduce" in str(error), error
    if on.rank == 1:
        error = failure_of(lambda: dist.all_reduce(torch.ones(3), group=small))
        assert isinstance(error, PeerLostError) and error.rank == last, error
        assert f"rank {last} of all" in str(error), error
    error = failure_of(lambda: dist.recv(torch.ones(3), last, group=messages))
    assert isinstance(error, PeerLostError) and error.rank == last, error
    error = failure_of(lambda: model(torch.ones(2, 4)).sum().backward())
    assert f"rank {last} " in str(error) and "PeerLostError" in str(error), error
    assert isinstance(model.process_group.failure, PeerLostError)
