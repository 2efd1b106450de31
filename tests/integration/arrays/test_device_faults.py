"""Arrays on devices: every collective on one that is slow, out of order, full of poison, and may fail."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ringcomm.arrays.kinds import BlockMirror, Done, MappedMirror, StagingPool
from ringcomm.arrays.operands import mirrors, submitted
from ringcomm.config import Settings
from ringcomm.errors import DeviceError, RingcommError
from ringcomm.ops import Sum
from ringcomm.testing.cluster import RankFailed, run_ranks
from tests.support import device_contract
from tests.support.device_contract import CHECKS, LONG, Lab, numbers
from tests.support.fake_device import FakeDevice, FakeEngine

SETTINGS = Settings(spin_us=0.0, timeout_s=30.0, start_timeout_s=30.0, segment_bytes=8192)


class FakeLab(Lab):
    """Arrays of a fake device."""

    def __init__(self, seed, **options):
        self.device = FakeDevice(seed, **options)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.device.close()

    def array(self, values):
        return self.device.array(values)

    def numpy(self, array):
        return array.numpy()

    def add_slowly(self, array, number):
        array.apply(lambda memory: np.add(memory, memory.dtype.type(number), out=memory), takes_s=0.01)

    def strided(self, values):
        turned = self.device.array(np.ascontiguousarray(values.T))
        turned.memory = turned.memory.T
        return turned


def submitted_in_place(context, array):
    return submitted(context.staging, array, "in place")


def start(context, target, name):
    return context.engine.allreduce(
        [target.flat], Sum, name, [target.shape], convert=lambda _: target.finish(), mirrors=mirrors([target])
    )


def run_check(check, size=2, seed=0, delay_s=0.0005, **options):
    """Run one check on ranks that each have a device with seeded delays."""

    def work(context):
        with FakeLab(1000 * seed + context.rank, delay_s=delay_s, **options) as lab:
            check(context, lab)

    run_ranks(size, work, settings=SETTINGS)


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_numbers_are_those_of_numpy_arrays(check, size):
    run_check(check, size, seed=size)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_overtakes_what(seed):
    for check in (device_contract.check_order_of_the_stream, device_contract.check_asynchronous):
        run_check(check, 2, seed)


def test_tensors_of_the_cpu_are_reduced_in_place():
    torch = pytest.importorskip("torch")

    def work(context):
        tensor = torch.full((3, 4), context.rank + 1.0)
        assert context.allreduce_(tensor, op=Sum) is tensor
        half = torch.ones(5, dtype=torch.bfloat16)
        context.broadcast_(context.allreduce_(half, op=Sum))
        return tensor.unique().tolist() + half.unique().tolist()

    assert run_ranks(2, work) == [[3.0, 2.0]] * 2


def test_a_broadcast_by_name_comes_after_what_the_device_has_still_to_do():
    """A rank that only receives writes into the memory that it shares with the device, after its program."""
    run_check(device_contract.check_asynchronous_rows, delay_s=0.05, mapped=True)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_memory_that_host_and_device_share(check):
    run_check(check, mapped=True)


def test_the_host_waits_for_the_program_before_it_uses_mapped_memory(monkeypatch):
    monkeypatch.setattr(MappedMirror, "fetch", lambda mirror, *how: None)

    def check(context, lab):
        for _ in range(20):
            device_contract.check_order_of_the_stream(context, lab)

    with pytest.raises(RankFailed) as caught:
        run_check(check, delay_s=0.004, mapped=True)
    assert isinstance(caught.value.__cause__, AssertionError)


# ---- steady state ------------------------------------------------------------------------------


def test_nothing_is_allocated_and_no_thread_waits_in_steady_state(monkeypatch):
    def work(context):
        with FakeLab(context.rank) as lab:
            arrays = [lab.array(numbers(context, 400_000)) for _ in range(3)]
            counts = []
            for step in range(10):
                for array in arrays:
                    context.allreduce_(array, op=Sum)
                targets = [submitted_in_place(context, array) for array in arrays]
                handles = [start(context, target, f"{step}.{n}") for n, target in enumerate(targets)]
                for handle in handles:
                    handle.wait()
                lab.device.main.put().wait()  # all results are there, so all blocks are free
                counts.append(lab.device.blocks)
            return counts, context.staging.allocations, lab.device

    for counts, allocations, device in run_ranks(2, work, settings=SETTINGS):
        # A block for each array on its way at the same time, once: three direct calls, three by name.
        assert allocations == device.blocks == counts[-1] <= 6, counts
        assert device.host_waits == 0
        assert device.copies_out == device.copies_in == 60, "one copy each way for each array"


# ---- missing waits -------------------------------------------------------------------------------


def load_without_a_wait(monkeypatch):
    """What is loaded counts as loaded at once."""
    load = BlockMirror.load

    def unawaited(mirror, start, stop):
        load(mirror, start, stop)
        return Done(None, lambda: True)

    monkeypatch.setattr(BlockMirror, "load", unawaited)


def copy_before_the_program(monkeypatch):
    """Copies do not wait for what the program has queued."""
    monkeypatch.setattr(BlockMirror, "_after", lambda mirror, direction: None)


def program_before_the_copy(monkeypatch):
    """The program's stream does not wait for the result."""
    monkeypatch.setattr(FakeEngine, "follow", lambda engine, done: None)


def block_in_use(monkeypatch):
    """A block is used again while a copy still reads it."""
    give = StagingPool.give
    monkeypatch.setattr(StagingPool, "give", lambda pool, returned: give(pool, returned._replace(pending=())))


def bucket_before_the_load(monkeypatch):
    """The engine packs small arrays that are not loaded yet."""
    monkeypatch.setattr(BlockMirror, "fetch", lambda mirror, *how: None)


MISSING = [
    load_without_a_wait, copy_before_the_program, program_before_the_copy, block_in_use,
    bucket_before_the_load,
]  # fmt: skip


SEARCHED = [
    device_contract.check_order_of_the_stream, device_contract.check_repeated,
    device_contract.check_asynchronous,
]  # fmt: skip


@pytest.mark.parametrize("missing", MISSING, ids=lambda missing: missing.__name__)
def test_a_missing_wait_is_found(missing, monkeypatch):
    missing(monkeypatch)
    with pytest.raises(RankFailed) as caught:
        for seed in range(20):
            for check in SEARCHED:
                run_check(check, 2, seed, delay_s=0.004)
    assert isinstance(caught.value.__cause__, AssertionError)


# ---- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "place"), [("memory", 1), ("tcp", 2), ("tcp", 4)])
def test_a_copy_to_the_host_that_fails_is_an_error_on_every_rank(place, transport):
    def work(context):
        with FakeLab(context.rank, fail_out=place if context.rank == 1 else 0) as lab:
            arrays = [lab.array(numbers(context, LONG)) for _ in range(4)]
            with pytest.raises(RingcommError) as caught:
                for array in arrays:
                    context.allreduce_(array, op=Sum)
            return caught.value

    errors = run_ranks(3, work, transport=transport, settings=SETTINGS)
    assert isinstance(errors[1], DeviceError)
    assert "this copy was to fail" in str(errors[1])
    if transport == "tcp":
        for error in (errors[0], errors[2]):
            assert "rank 1" in str(error) and "this copy was to fail" in str(error)


@pytest.mark.parametrize("count", [100, LONG])
def test_a_copy_that_fails_is_an_error_of_asynchronous_operations_on_every_rank(count):
    """Of small arrays, which the engine loads before it packs them, and of large ones."""

    def work(context):
        with FakeLab(context.rank, fail_out=2 if context.rank == 1 else 0) as lab:
            arrays = [lab.array(numbers(context, count)) for _ in range(3)]
            with pytest.raises(RingcommError) as caught:
                handles = [
                    start(context, submitted_in_place(context, array), str(number))
                    for number, array in enumerate(arrays)
                ]
                for handle in handles:
                    handle.wait()
            return caught.value

    errors = run_ranks(3, work, transport="tcp", settings=SETTINGS)
    assert ["this copy was to fail" in str(error) for error in errors] == [True] * 3
    assert "rank 1" in str(errors[0]) and "rank 1" in str(errors[2])


def test_a_copy_to_the_device_that_fails_is_an_error_of_that_rank():
    """No thread waits for it, so a later call finds it, at the latest when it needs the block."""

    def work(context):
        with FakeLab(context.rank, fail_in=1 if context.rank == 1 else 0) as lab:
            array = lab.array(numbers(context, LONG))
            with pytest.raises(RingcommError) as caught:
                for _ in range(3):
                    context.allreduce_(array, op=Sum)
                    lab.numpy(array)
            return caught.value

    errors = run_ranks(2, work, transport="tcp", settings=SETTINGS)
    assert isinstance(errors[1], DeviceError)


def test_a_device_that_does_not_copy_is_an_error_after_the_time_limit():
    settings = Settings(spin_us=0.0, timeout_s=1.0, start_timeout_s=30.0)
    ended = threading.Event()

    def work(context):
        with FakeLab(context.rank) as lab:
            array = lab.array(numbers(context, 1000))
            if context.rank == 0:
                array.apply(lambda memory: ended.wait(30.0))
            try:
                with pytest.raises(RingcommError) as caught:
                    context.allreduce_(array, op=Sum)
            finally:
                if context.rank == 0:
                    ended.set()
            return caught.value

    errors = run_ranks(2, work, settings=settings)
    assert isinstance(errors[0], DeviceError) and "1 s" in str(errors[0])
