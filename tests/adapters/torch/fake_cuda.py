"""Tensors of the CPU that ringcomm takes for tensors of a device: copies are late, and poison until then.

PyTorch executes its own operations on such tensors at once, so where a stream would wait, the thread waits.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from ringcomm import api
from ringcomm.arrays import kinds
from ringcomm.arrays.torch_tensors import TorchKind
from ringcomm.testing.cluster import run_ranks
from ringcomm.testing.fake_device import FakeArray, FakeDevice, FakeEngine


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
    """Every tensor is on the device of the rank that asks."""

    def __init__(self, **options):
        self.options = options
        self.devices = []

    def on_device(self, value):
        return True

    def engine(self, value):
        self.devices.append(FakeDevice(len(self.devices), **self.options))
        return Engine(self.devices[-1])


def run_on_devices(monkeypatch, size, function, settings=None, kind=None):
    """Run ``function(context)`` on ranks that are threads, with ``api`` as in a process of its own."""
    local = threading.local()
    monkeypatch.setattr(api, "context", lambda: local.context)
    if kind is not None:
        monkeypatch.setitem(kinds._BY_TYPE, torch.Tensor, kind)
        monkeypatch.setitem(kinds._BY_TYPE, torch.nn.Parameter, kind)

    def work(context):
        local.context = context
        return function(context)

    try:
        return run_ranks(size, work, settings=settings)
    finally:
        for device in kind.devices if kind is not None else ():
            device.close()


def same(found, expected):
    """Whether tensors have the same bits."""
    one, other = found.detach().numpy(), np.asarray(expected)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
