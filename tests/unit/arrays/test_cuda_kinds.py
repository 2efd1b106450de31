"""The kinds that need a GPU, on stand-ins for CuPy: which arrays are of them, and whose memory is shared.

Copies are tested where there is hardware (``bash tests/run.sh --gpu``).
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ringcomm.arrays import kinds
from ringcomm.arrays.cupy_arrays import DLPACK, _shares_cached_memory
from ringcomm.arrays.cupy_arrays import KIND as CUPY
from ringcomm.errors import Misuse


class Array:
    """A ``cupy.ndarray`` whose memory is NumPy's."""

    def __init__(self, memory):
        self.memory = memory
        self.data = SimpleNamespace(ptr=memory.ctypes.data)
        self.shape, self.dtype = memory.shape, memory.dtype
        self.device = Device(0)

    def reshape(self, *shape):
        return Array(self.memory.reshape(*shape))

    def __getitem__(self, index):
        return Array(self.memory[index])

    def __setitem__(self, index, value):
        self.memory[index] = value.memory


class Device:
    def __init__(self, number):
        self.id = number

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


@pytest.fixture
def cupy(monkeypatch):
    cuda = SimpleNamespace(Device=Device)
    module = SimpleNamespace(
        cuda=cuda, empty=lambda shape, dtype: Array(np.empty(shape, dtype)),
        ascontiguousarray=lambda value: Array(np.ascontiguousarray(value.memory)),
        from_dlpack=lambda value: Array(value.memory), asarray=lambda value: Array(value.memory),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


class Exported:
    def __init__(self, memory, device=2):
        self.memory = memory
        self._device = device

    def __dlpack__(self, stream=None):
        raise AssertionError("the stand-in takes the memory")

    def __dlpack_device__(self):
        return (self._device, 0)


class Interface:
    """As of Numba: a device array without DLPack."""

    def __init__(self, memory):
        self.memory = memory

    __cuda_array_interface__ = {}  # noqa: RUF012


def test_dlpack_shares_the_memory(cupy):
    for made in (Exported(np.arange(4.0)), Interface(np.arange(4.0))):
        assert kinds.device_kind(made) is DLPACK
        flat, shares = DLPACK.flat(made)
        assert shares and np.shares_memory(flat.memory, made.memory)
        assert DLPACK.describe(made) == ((4,), np.dtype(float))
    assert kinds.device_kind(Exported(np.zeros(1), device=1)) is None


def test_dlpack_without_cupy_and_torch_is_a_clear_error(monkeypatch):
    for name in ("cupy", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Misuse, match="CuPy or PyTorch"):
        DLPACK.flat(Exported(np.zeros(3)))


def test_immutable_arrays_are_not_overwritten():
    cls = type("ArrayImpl", (Exported,), {"__module__": "jaxlib._jax"})
    with pytest.raises(Misuse, match="cannot be overwritten"):
        DLPACK.check_writable(cls(np.zeros(1)), "allreduce_")
    with contextlib.suppress(KeyError):
        kinds._BY_TYPE.pop(cls)


@pytest.mark.parametrize(("integrated", "capability"), [(1, "87"), (1, "62"), (0, "87")])
def test_only_memory_that_the_processor_caches_is_used_as_mapped(cupy, integrated, capability):
    _shares_cached_memory.cache_clear()
    facts = {"attributes": {"Integrated": integrated}, "compute_capability": capability}
    cupy.cuda.Device = type("Device", (Device,), facts)
    memory = np.arange(4.0)
    owner = type("PinnedMemory", (), {})()
    flat = SimpleNamespace(
        data=SimpleNamespace(mem=SimpleNamespace(_owner=owner), ptr=memory.ctypes.data), nbytes=32,
        device=SimpleNamespace(id=0), dtype=memory.dtype,
    )  # fmt: skip
    shared = CUPY.mapped(flat)
    assert (shared is not None and np.shares_memory(shared, memory)) == (integrated and capability == "87")
    flat.data.mem._owner = None  # managed memory, which the host must not touch meanwhile
    assert CUPY.mapped(flat) is None
    _shares_cached_memory.cache_clear()
