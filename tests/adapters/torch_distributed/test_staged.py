"""Operations of a process group on tensors of devices: the numbers, and what is copied."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringcomm.arrays import kinds
from ringcomm.arrays.mirrors import StagingPool
from ringcomm.config import Settings
from ringcomm.errors import Misuse
from ringcomm.ops import codec_number
from ringcomm.torch.distributed import _staged
from ringcomm.torch.distributed._bridge import GroupReduction
from ringcomm.torch.distributed._collectives import Collectives, Packed
from ringcomm.torch.distributed._staged import Staged
from ringcomm.torch.distributed._work import RingcommWork
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


def test_compressed_parts(ranks_of):
    """Two spans of the tensor, in another order; the rest does not change."""

    def operate(rank, ops, on_device):
        places = [(0, 256, 512), (512, 700, 0)]
        packed = [Packed(codec_number("bf16"), places, np.zeros(768, np.float32), None)]
        return on_device(ops.all_reduce_packed, whole(rank, torch.float32), packed)

    for rank, found in enumerate(run(ranks_of, 2, operate)):
        expected = whole(rank, torch.float32)
        for span in (slice(0, 256), slice(512, 700)):
            expected[span] = (whole(0, torch.float32)[span] + whole(1, torch.float32)[span]) / 2
        assert torch.equal(found, expected)


@pytest.mark.parametrize("root", [0, 2])
def test_in_a_broadcast_only_the_root_loads(root, ranks_of, monkeypatch):
    kinds = []

    def operate(rank, ops, on_device):
        return [
            on_device(ops.broadcast, whole(rank, torch.float32), root, reads=rank == root) for _ in range(3)
        ]

    engine = Kind.engine
    monkeypatch.setattr(Kind, "engine", lambda kind, value: kinds.append(kind) or engine(kind, value))
    for found in run(ranks_of, 3, operate):
        assert all(torch.equal(tensor, whole(root, torch.float32)) for tensor in found)
    loads = sorted(device.copies_out for device in kinds[0].devices)
    assert loads[:2] == [0, 0] and loads[2] > 0


@pytest.fixture
def device(monkeypatch):
    """Every tensor is on a device, of which the kind is given."""
    kind = Kind()
    monkeypatch.setitem(kinds._BY_TYPE, torch.Tensor, kind)
    yield kind
    for made in kind.devices:
        made.close()


class TestTensorsThatCannotBeStaged:
    def stage(self, *tensors):
        return Staged(StagingPool(), tensors, [], False)

    def test_sparse_ones(self, device):
        with pytest.raises(Misuse, match="supports dense tensors on devices, not torch.sparse_coo"):
            self.stage(torch.ones(2).to_sparse())

    def test_some_on_the_cpu(self, device):
        device.on_device = lambda tensor: tensor.numel() > 1
        with pytest.raises(Misuse, match="must be on one device; this one has some on the CPU"):
            self.stage(torch.ones(2), torch.ones(1))


def test_a_tensor_that_is_given_twice_is_staged_once(device):
    tensor, other = torch.arange(3.0), torch.ones(2)
    staged = _staged.staged(StagingPool(), [[other, tensor], tensor, "x", 5], [tensor], True)
    (one, two), again, *rest = staged.arguments
    assert again is two and one is not two and rest == ["x", 5]
    assert staged.fetched(until_done) == [one, two] and two.tolist() == [0.0, 1.0, 2.0]
    two += 1
    one += 1  # it is not written
    staged.deliver()
    assert (tensor.tolist(), other.tolist()) == ([1.0, 2.0, 3.0], [1.0, 1.0])


def test_the_programs_stream_waits_for_the_result(device, monkeypatch):
    """Streams and events are stand-ins; what hardware does is tested where there is some."""
    calls, made = [], []

    class Event:
        def record(self):
            calls.append("record")

    class Stream:
        def __init__(self, device):
            made.append(device)

        def wait_event(self, event):
            calls.append("the program waits")

    @contextmanager
    def current(stream):
        calls.append("begin")
        yield
        calls.append("end")

    monkeypatch.setattr(_staged, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    tensor = torch.arange(3.0)
    staged = Staged(StagingPool(), [tensor], [tensor], True)
    staged._device = torch.device("cuda:0")
    staged.follow()
    assert calls == [], "there is nothing to wait for yet"
    host = staged.fetched(until_done)
    host += 1
    staged.deliver()
    staged.follow()
    assert tensor.tolist() == [1.0, 2.0, 3.0]
    assert calls == ["begin", "record", "end", "the program waits"]
    with staged.stream():
        pass
    assert made == [staged._device] * 2, "the stream of the group, and the program's"


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
