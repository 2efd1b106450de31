"""Copies of a device that fail or hang, and waits that are missing: none goes unnoticed."""

from __future__ import annotations

import threading

import pytest

from ringcomm.arrays.kinds import BlockMirror, Done, StagingPool
from ringcomm.config import Settings
from ringcomm.errors import DeviceError, RingcommError
from ringcomm.ops import Sum
from ringcomm.testing.cluster import RankFailed, run_ranks
from tests.integration.arrays.fake_lab import SETTINGS, FakeLab, run_check, start, submitted_in_place
from tests.support import device_contract
from tests.support.device_contract import LONG, numbers
from tests.support.fake_device import FakeEngine


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
