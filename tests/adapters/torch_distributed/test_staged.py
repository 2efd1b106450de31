"""Operations of a process group on tensors of devices: the numbers, and what is copied."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ringcomm.arrays import kinds
from ringcomm.arrays.kinds import StagingPool
from ringcomm.config import Settings
from ringcomm.torch.distributed._collectives import Collectives, GroupReduction, Staged
from ringcomm.torch.distributed._operations import RingcommWork
from tests.adapters.torch.fake_cuda import Kind, all_tensors_of
from tests.support.fake_device import until_done

SETTINGS = Settings(spin_us=0.0, timeout_s=30.0, segment_bytes=8192)
COUNT = 300_000


def run(ranks_of, size, operate):
    """Run ``operate(rank, ops, on_device)`` on ranks with slow devices."""

    def work(context):
        ops, pool = Collectives(context._runner), StagingPool()

        def on_device(do, tensor, *more, reads=True):
            staged = Staged(pool, [tensor, *more], [tensor], reads)
            staged.run(do, context._runner)
            staged.follow()
            return tensor

        return operate(context.rank, ops, on_device)

    with all_tensors_of(Kind(delay_s=0.002)):
        return ranks_of(size, work, settings=SETTINGS)


def whole(rank, dtype):
    """Numbers whose sums are exact."""
    return (torch.arange(COUNT) % 50 + rank).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_reduce(dtype, ranks_of):
    how = GroupReduction.of(dist.ReduceOp.SUM)

    def operate(rank, ops, on_device):
        return [on_device(ops.all_reduce, whole(rank, dtype), how) for _ in range(3)]

    expected = sum(whole(rank, torch.int64) for rank in range(2)).to(dtype)
    for found in run(ranks_of, 2, operate):
        assert all(torch.equal(tensor, expected) for tensor in found)


@pytest.fixture
def device(monkeypatch):
    """Every tensor is on a device, of which the kind is given."""
    kind = Kind()
    monkeypatch.setitem(kinds._BY_TYPE, torch.Tensor, kind)
    yield kind
    for made in kind.devices:
        made.close()


def test_a_work_on_a_device_is_waited_for_in_every_way(device):
    for asked_before in (True, False):
        tensor = torch.arange(3.0)
        staged = Staged(StagingPool(), [tensor], [tensor], True)

        def run(work, staged=staged):
            host = staged.fetched(until_done)
            host += 1
            staged.deliver()

        work = RingcommWork("allreduce", [tensor], run, on_device=staged)
        future = work.get_future() if asked_before else None
        work.perform()
        future = work.get_future() if future is None else future
        assert work.wait() and future.wait()[0] is tensor and tensor.tolist() == [1.0, 2.0, 3.0]
