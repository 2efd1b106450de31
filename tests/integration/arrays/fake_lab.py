"""Arrays of a fake device: what its tests share."""

from __future__ import annotations

import numpy as np

from ringcomm.arrays.operands import mirrors, submitted
from ringcomm.config import Settings
from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks
from tests.support.device_contract import Lab
from tests.support.fake_device import FakeDevice

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


def run_check(check, size, seed=0, transport="memory", delay_s=0.0005):
    """Run one check on ranks that each have a device with seeded delays."""

    def work(context):
        with FakeLab(1000 * seed + context.rank, delay_s=delay_s) as lab:
            check(context, lab)

    run_ranks(size, work, transport=transport, settings=SETTINGS)
