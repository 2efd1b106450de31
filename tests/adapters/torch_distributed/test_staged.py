"""Operations of a process group on tensors of devices: the numbers, and which overlap with the copies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ringcomm.arrays.mirrors import BlockMirror, StagingPool
from ringcomm.config import Settings
from ringcomm.torch.distributed._collectives import Collectives
from ringcomm.torch.distributed._reductions import Reduction
from ringcomm.torch.distributed._staged import Staged
from tests.adapters.torch.fake_cuda import Kind, run_on_devices

SETTINGS = Settings(spin_us=0.0, timeout_s=30.0, segment_bytes=8192)
COUNT = 300_000


@pytest.fixture
def fetched(monkeypatch):
    """The mirrors whose loads were waited for as a whole."""
    found = []
    fetch = BlockMirror.fetch
    monkeypatch.setattr(
        BlockMirror, "fetch", lambda mirror, watch=None: found.append(mirror) or fetch(mirror, watch)
    )
    return found


def run(monkeypatch, size, operate):
    """Run ``operate(rank, ops, on_device)`` on ranks with slow devices."""

    def work(context):
        ops, pool = Collectives(context._runner), StagingPool()

        def on_device(do, overlapping, tensor, *more, reads=True):
            staged = Staged(pool, [tensor, *more], [tensor], reads)
            staged.run(do, context._runner, overlapping)
            staged.follow()
            return tensor

        return operate(context.rank, ops, on_device)

    return run_on_devices(monkeypatch, size, work, SETTINGS, Kind(delay_s=0.002))


def whole(rank, dtype):
    """Numbers whose sums are exact."""
    return (torch.arange(COUNT) % 50 + rank).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_reduce_overlaps_with_the_copies(dtype, fetched, monkeypatch):
    how = Reduction.of(dist.ReduceOp.SUM)

    def operate(rank, ops, on_device):
        return [
            on_device(ops.all_reduce, ops.all_reduce_staged, whole(rank, dtype), how) for _ in range(3)
        ]

    expected = sum(whole(rank, torch.int64) for rank in range(2)).to(dtype)
    for found in run(monkeypatch, 2, operate):
        assert all(torch.equal(tensor, expected) for tensor in found)
    assert not fetched


def test_a_reduction_that_the_host_prepares_is_copied_as_a_whole(fetched, monkeypatch):
    def operate(rank, ops, on_device):
        how = Reduction.of(dist._make_nccl_premul_sum(float(rank + 1)))
        return on_device(ops.all_reduce, ops.all_reduce_staged, whole(rank, torch.float32), how)

    expected = whole(0, torch.float32) + 2 * whole(1, torch.float32)
    for found in run(monkeypatch, 2, operate):
        assert torch.equal(found, expected)
    assert fetched


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_overlaps_and_other_ranks_load_nothing(root, fetched, monkeypatch):
    kinds = []

    def operate(rank, ops, on_device):
        return [
            on_device(
                ops.broadcast, ops.broadcast_staged, whole(rank, torch.float32), root, reads=rank == root
            )
            for _ in range(3)
        ]

    engine = Kind.engine
    monkeypatch.setattr(Kind, "engine", lambda kind, value: kinds.append(kind) or engine(kind, value))
    for found in run(monkeypatch, 3, operate):
        assert all(torch.equal(tensor, whole(root, torch.float32)) for tensor in found)
    assert not fetched
    loads = sorted(device.copies_out for device in kinds[0].devices)
    assert loads[:2] == [0, 0] and loads[2] > 0
