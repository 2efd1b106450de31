"""Arrays on devices: every collective on a device that is slow, out of order and full of poison."""

from __future__ import annotations

import pytest

from ringcomm.arrays.kinds import MappedMirror
from ringcomm.ops import Sum
from ringcomm.testing.cluster import RankFailed, run_ranks
from tests.integration.arrays.fake_lab import SETTINGS, FakeLab, run_check, start, submitted_in_place
from tests.support import device_contract
from tests.support.device_contract import CHECKS, numbers


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

    def work(context):
        with FakeLab(context.rank, delay_s=0.05, mapped=True) as lab:
            device_contract.check_asynchronous_rows(context, lab)

    run_ranks(2, work, settings=SETTINGS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_memory_that_host_and_device_share(check):
    def work(context):
        with FakeLab(context.rank, delay_s=0.0005, mapped=True) as lab:
            check(context, lab)

    run_ranks(2, work, settings=SETTINGS)


def test_the_host_waits_for_the_program_before_it_uses_mapped_memory(monkeypatch):
    monkeypatch.setattr(MappedMirror, "fetch", lambda mirror, *how: None)

    def work(context):
        with FakeLab(context.rank, delay_s=0.004, mapped=True) as lab:
            for _ in range(20):
                device_contract.check_order_of_the_stream(context, lab)

    with pytest.raises(RankFailed) as caught:
        run_ranks(2, work, settings=SETTINGS)
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
