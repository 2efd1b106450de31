"""Arrays on devices: every collective on a device that is slow, out of order and full of poison."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ringcomm.arrays.mapped import slowdown
from ringcomm.arrays.mirrors import BlockMirror, StagingPool
from ringcomm.arrays.operands import mirrors, submitted
from ringcomm.collective.flows import Receipt
from ringcomm.collective.staged import Done, StagedExecution
from ringcomm.config import Settings
from ringcomm.errors import DeviceError, RingcommError
from ringcomm.ops import Sum
from ringcomm.schedule.registry import Problem, build
from ringcomm.schedule.steps import even_bounds
from ringcomm.testing import device_contract
from ringcomm.testing.cluster import RankFailed, run_ranks
from ringcomm.testing.device_contract import CHECKS, LONG, Lab, numbers, same
from ringcomm.testing.fake_device import FakeDevice, FakeEngine

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


def run_check(check, size, seed=0, transport="memory", delay_s=0.0005):
    """Run one check on ranks that each have a device with seeded delays."""

    def work(context):
        with FakeLab(1000 * seed + context.rank, delay_s=delay_s) as lab:
            check(context, lab)

    run_ranks(size, work, transport=transport, settings=SETTINGS)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_numbers_are_those_of_numpy_arrays(check, size):
    run_check(check, size, seed=size)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_overtakes_what(seed):
    for check in (device_contract.check_order_of_the_stream, device_contract.check_asynchronous):
        run_check(check, 2, seed)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "doubling", "one_shot", "pipelined"])
def test_every_algorithm_of_all_reduce(algorithm):
    settings = Settings(spin_us=0.0, timeout_s=30.0, segment_bytes=4096, algorithm=algorithm)

    def work(context):
        with FakeLab(context.rank, delay_s=0.0005) as lab:
            for count in (3, LONG // 3):
                values = numbers(context, count)
                same(
                    lab.numpy(context.allreduce(lab.array(values), op=Sum)),
                    context.allreduce(values, op=Sum),
                    algorithm,
                )

    run_ranks(4, work, settings=settings)


LONGER = 900_000
"""Elements of arrays for which ranks vote on the schedule, and that have several blocks in `pipelined`."""


def staged_runs(runner):
    """How often all-reduces have been run by the schedule for arrays on devices, and by others."""
    plans = runner._plans._plans.values()
    assert all(
        tuple(plan.schedule) == build("allreduce", "pipelined", problem(runner, plan.call.items))
        for plan in plans
        if plan.call.staged
    )
    return sum(plan.runs for plan in plans if plan.call.staged), sum(
        plan.runs for plan in plans if not plan.call.staged
    )


def problem(runner, count):
    return Problem(runner.rank, runner.size, count, even_bounds(count, runner.size))


def test_the_schedule_for_devices_is_used_once_all_ranks_have_seen_that_all_arrays_are_on_them():
    """With three ranks a round of votes takes two calls. Numbers are the same whatever was agreed."""
    size, rank_on_host = 3, 1

    def work(context):
        values = numbers(context, LONGER)
        expected = context.allreduce(values, op=Sum)  # the first vote: no array is on a device
        context.allreduce(values, op=Sum)
        found = []
        with FakeLab(context.rank) as lab:
            for on_host in (False, False, False, True, True, False, False, False):
                if on_host and context.rank == rank_on_host:
                    same(context.allreduce(values, op=Sum), expected, "in host memory")
                else:
                    same(lab.numpy(context.allreduce(lab.array(values), op=Sum)), expected, "on a device")
                found.append(staged_runs(context._runner)[0])
        return found

    # Calls 0 and 1 agree that all are; calls 4 and 5 that they are not.
    found = run_ranks(size, work, settings=SETTINGS)
    assert found == [[0, 0, 1, 2, 3, 4, 4, 4]] * size


def test_operations_by_name_agree_too():
    def work(context):
        values = numbers(context, LONGER)
        expected = context.allreduce(values, op=Sum)
        with FakeLab(context.rank) as lab:
            for step in range(3):
                target = submitted_in_place(context, array := lab.array(values))
                start(context, target, str(step)).wait()
                same(lab.numpy(array), expected, "by name")
        (runner,) = context.engine._bucket_runner._runners.values()
        return staged_runs(runner)

    assert run_ranks(2, work, settings=SETTINGS) == [(2, 1)] * 2


def test_arrays_in_host_memory_never_use_the_schedule_for_devices():
    def work(context):
        for _ in range(3):
            context.allreduce(numbers(context, LONGER), op=Sum)
        return staged_runs(context._runner)

    assert run_ranks(2, work, settings=SETTINGS) == [(0, 3)] * 2


def test_tensors_of_the_cpu_are_reduced_in_place():
    torch = pytest.importorskip("torch")

    def work(context):
        tensor = torch.full((3, 4), context.rank + 1.0)
        assert context.allreduce_(tensor, op=Sum) is tensor
        half = torch.ones(5, dtype=torch.bfloat16)
        context.broadcast_(context.allreduce_(half, op=Sum))
        return tensor.unique().tolist() + half.unique().tolist()

    assert run_ranks(2, work) == [[3.0, 2.0]] * 2


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_over_sockets(transport):
    run_check(device_contract.check_order_of_the_stream, 2, transport=transport)
    run_check(device_contract.check_asynchronous, 2, transport=transport)


@pytest.mark.parametrize("times", [1.0, 20.0], ids=["cached", "uncached"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_memory_that_host_and_device_share(check, times):
    """Numbers are right whether arrays are used without a copy or, where that is slow, are copied."""

    def work(context):
        with FakeLab(context.rank, delay_s=0.0005, mapped_slowdown=times) as lab:
            check(context, lab)

    run_ranks(2, work, settings=SETTINGS)


@pytest.mark.parametrize("times, copied", [(1.0, False), (20.0, True), (None, True)])
def test_a_measurement_decides_whether_mapped_memory_is_copied(times, copied):
    def work(context):
        with FakeLab(context.rank, mapped_slowdown=times) as lab:
            context.allreduce_(lab.array(numbers(context, 1000)), op=Sum)
            return lab.device.copies_out > 0, lab.device.copies_in > 0, lab.device.blocks > 0

    assert run_ranks(2, work, settings=SETTINGS) == [(copied, copied, copied)] * 2


def test_additions_are_measured_on_memory():
    assert slowdown(np.empty(1 << 20, np.uint8)) > 0.0


def test_the_host_waits_for_the_program_before_it_uses_mapped_memory(monkeypatch):
    monkeypatch.setattr(FakeEngine, "reached", lambda engine, mark: AtOnce())

    def work(context):
        with FakeLab(context.rank, delay_s=0.004, mapped_slowdown=1.0) as lab:
            for _ in range(20):
                device_contract.check_order_of_the_stream(context, lab)

    with pytest.raises(RankFailed) as caught:
        run_ranks(2, work, settings=SETTINGS)
    assert isinstance(caught.value.__cause__, AssertionError)


# ---- the suite finds what is missing -----------------------------------------------------------


class AtOnce(Done):
    def poll(self):
        return True


def load_without_a_wait(monkeypatch):
    """What is loaded counts as loaded at once."""
    load = BlockMirror.load

    def unawaited(mirror, start, stop):
        load(mirror, start, stop)
        return AtOnce()

    monkeypatch.setattr(BlockMirror, "load", unawaited)


def send_before_the_load(monkeypatch):
    """Steps do not depend on loads."""
    connect = StagedExecution._connect

    def unconnected(execution, flow, buffer):
        before = flow.before
        connect(execution, flow, buffer)
        flow.before = before

    monkeypatch.setattr(StagedExecution, "_connect", unconnected)


def store_before_the_fold(monkeypatch):
    """Stores do not depend on what a rank folds, only on what it receives."""
    connect = StagedExecution._connect

    def unconnected(execution, flow, buffer):
        stores, receipt = execution._stores, isinstance(flow, Receipt) and flow.fold
        execution._stores = [] if receipt else stores
        connect(execution, flow, buffer)
        execution._stores = stores

    monkeypatch.setattr(StagedExecution, "_connect", unconnected)


def copy_before_the_program(monkeypatch):
    """Copies do not wait for what the program has queued."""
    monkeypatch.setattr(BlockMirror, "_after", lambda mirror, direction: None)


def program_before_the_copy(monkeypatch):
    """The program's stream does not wait for the result."""
    monkeypatch.setattr(FakeEngine, "follow", lambda engine, done: None)


def block_in_use(monkeypatch):
    """A block is used again while a copy still reads it."""
    give = StagingPool.give
    monkeypatch.setattr(
        StagingPool, "give", lambda pool, returned: give(pool, returned._replace(pending=()))
    )


def bucket_before_the_load(monkeypatch):
    """The engine packs small arrays that are not loaded yet."""
    monkeypatch.setattr(BlockMirror, "fetch", lambda mirror, watch=None: mirror.host)


MISSING = [
    load_without_a_wait, send_before_the_load, store_before_the_fold, copy_before_the_program,
    program_before_the_copy, block_in_use, bucket_before_the_load,
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


@pytest.mark.parametrize("transport", ["memory", "tcp"])
@pytest.mark.parametrize("place", [1, 2, 4])
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


def test_the_rows_of_a_rank_that_is_alone():
    def work(context):
        values = numbers(context, 5, 3)
        with FakeLab(0, delay_s=0.0005) as lab:
            same(lab.numpy(context.reducescatter(lab.array(values), op=Sum)), values, "reducescatter")
            array = lab.array(values)
            found = context.reducescatter_(array, op=Sum, prescale_factor=2.0)
            same(lab.numpy(found), 2 * values, "in place")
            same(lab.numpy(array), 2 * values, "the array itself")

    run_ranks(1, work, settings=SETTINGS)


# ---- steady state ------------------------------------------------------------------------------


def test_nothing_is_allocated_and_no_thread_waits_in_steady_state(monkeypatch):
    fetched = []
    fetch = BlockMirror.fetch
    monkeypatch.setattr(
        BlockMirror, "fetch", lambda mirror, watch=None: fetched.append(1) or fetch(mirror, watch)
    )

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
        # 1.6 MB each: loads are cut where steps are (two chunks), in pieces of 512 KiB at most.
        assert 60 * 2 <= device.copies_out <= 60 * 8 and 60 * 2 <= device.copies_in <= 60 * 8
    assert fetched == []


def test_calls_on_devices_are_in_the_sums():
    def work(context):
        with FakeLab(context.rank) as lab:
            for _ in range(3):
                context.allreduce(lab.array(numbers(context, LONG)), op=Sum)
            totals = context._runner.totals()
            return totals.kinds["allreduce"].runs, totals.peers[1 - context.rank].sent_bytes

    for runs, sent_bytes in run_ranks(2, work):
        assert runs == 3 and sent_bytes >= 3 * 4 * LONG


def submitted_in_place(context, array):
    return submitted(context.staging, array, "in place")


def start(context, target, name):
    return context.engine.allreduce(
        [target.flat], Sum, name, [target.shape], convert=lambda _: target.finish(), mirrors=mirrors([target])
    )
