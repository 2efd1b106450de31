"""Tensors of the CPU taken for those of a device: copies are late, and poison until then."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

from ringcomm.arrays import kinds
from ringcomm.arrays.torch_tensors import TorchKind
from tests.support.fake_device import FakeArray, FakeDevice, FakeEngine


class Engine(FakeEngine):
    def __init__(self, device):
        super().__init__(device)
        self.device = device

    def to_host(self, array, start, stop, block, after):
        return super().to_host(self._of(array), start, stop, block, after)

    def to_device(self, block, array, start, stop, after):
        return super().to_device(block, self._of(array), start, stop, after)

    def _of(self, tensor):
        return FakeArray(self.device, tensor.view(torch.uint8).numpy())

    def follow(self, done):
        done.wait()


class Kind(TorchKind):
    """Every tensor of the CPU is on the device of the rank that asks."""

    def __init__(self, seed=0, **options):
        self.seed = seed
        self.options = options
        self.devices = []

    def on_device(self, value):
        return value.is_cpu

    def engine(self, value):
        self.devices.append(FakeDevice(self.seed + len(self.devices), **self.options))
        return Engine(self.devices[-1])


def take_all_tensors_for_device_tensors(seed):
    """For a process of its own: from here on ringcomm takes every tensor for one of a slow device."""
    kind = Kind(delay_s=0.0005, seed=seed)
    for cls in (torch.Tensor, torch.nn.Parameter):
        kinds.register_kind(cls, kind)


@contextmanager
def all_tensors_of(kind):
    """Meanwhile ringcomm takes every tensor for one of the devices of this kind."""
    with mock.patch.dict(kinds._BY_TYPE, {torch.Tensor: kind, torch.nn.Parameter: kind}):
        try:
            yield
        finally:
            for device in kind.devices:
                device.close()


def same(found, expected):
    """Whether tensors have the same bits."""
    one, other = found.detach().numpy(), np.asarray(expected)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
