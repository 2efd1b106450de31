"""All-reduces with NCCL between the devices of a host, for which at least two are needed."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ringcomm.config import Settings
from ringcomm.ops import Average, Max, Sum
from ringcomm.testing.cluster import run_ranks
from tests.gpu.labs import TorchLab
from tests.support.device_contract import check_order_of_the_stream, check_repeated, same

SETTINGS = Settings(spin_us=0.0, timeout_s=120.0, start_timeout_s=60.0)
COUNT = 1_000_003


class NumberedLab(TorchLab):
    """CUDA tensors of one device of several."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def array(self, values):
        with self.torch.cuda.device(self.number):
            return super().array(values)

    def add_slowly(self, array, number):
        with self.torch.cuda.device(self.number):
            super().add_slowly(array, number)


@pytest.fixture
def devices():
    count = TorchLab().torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"NCCL needs a device for each rank, and there are {count}")
    return min(count, 4)


def whole(rank, dtype="float32"):
    """Whole numbers, whose sums are exact in any order of additions."""
    return (np.arange(COUNT) % 1000 + rank).astype(dtype)


@pytest.mark.parametrize("each", [None, 2])
def test_nccl_gives_exact_sums(devices, each, caplog):
    """On one host, and as two hosts of two devices if there are four."""
    if each is not None and devices < 4:
        pytest.skip("two hosts of two devices need four")
    caplog.set_level(logging.INFO, "ringcomm")

    def work(context):
        lab = NumberedLab(context.rank)
        for _ in range(context.size + 2):
            for op, expected in (
                (Sum, sum(whole(rank) for rank in range(devices))),
                (Max, whole(devices - 1)),
                (Average, sum(whole(rank) for rank in range(devices)) / np.float32(devices)),
            ):
                array = lab.array(whole(context.rank))
                lab.add_slowly(array, 0)
                context.allreduce_(array, op=op)
                same(lab.numpy(array), expected.astype(np.float32), repr(op))

    run_ranks(devices, work, settings=SETTINGS, ranks_per_host=each or devices, timeout_s=300)
    assert any("use NCCL" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("check", [check_order_of_the_stream, check_repeated])
def test_work_is_in_the_order_of_the_stream(devices, check):
    run_ranks(
        2, lambda context: check(context, NumberedLab(context.rank)), settings=SETTINGS, ranks_per_host=2,
        timeout_s=300,
    )  # fmt: skip


def test_two_ranks_on_one_device_go_through_host_memory(caplog):
    caplog.set_level(logging.INFO, "ringcomm")
    lab = TorchLab()
    run_ranks(2, lambda context: check_repeated(context, lab), settings=SETTINGS, ranks_per_host=2)
    assert any("go through host memory" in record.getMessage() for record in caplog.records)
