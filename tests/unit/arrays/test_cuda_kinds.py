"""The kinds that need a GPU, on stand-ins for CuPy: which calls they make, and in which order.

What hardware does with these calls is tested where there is some (``bash tests/run.sh --gpu``).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ringcomm.arrays import kinds
from ringcomm.arrays.cupy_arrays import DLPACK, _shares_cached_memory
from ringcomm.arrays.cupy_arrays import KIND as CUPY
from ringcomm.arrays.kinds import StagingPool
from ringcomm.errors import DeviceError, Misuse

calls = []


class Event:
    def __init__(self, disable_timing=False):
        self.stream = None

    def record(self, stream):
        self.stream = stream
        calls.append(("record", stream.name))

    @property
    def done(self):
        if Stream.broken:
            raise RuntimeError("cudaErrorIllegalAddress")
        return True


class Stream:
    broken = False

    def __init__(self, non_blocking=True, name=""):
        self.name = name or f"stream {len(Stream.made)}"
        self.ptr = self.name
        Stream.made.append(self)

    made = []

    def wait_event(self, event):
        calls.append(("wait", self.name, event.stream.name))

    def __enter__(self):
        calls.append(("use", self.name))

    def __exit__(self, *exception):
        calls.append(("leave", self.name))


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


def copy(target, source, nbytes, direction, stream):
    calls.append(("copy", direction, nbytes, stream))
    ctypes.memmove(target, source, nbytes)


@pytest.fixture
def cupy(monkeypatch):
    calls.clear()
    Stream.made, Stream.broken = [], False
    current = Stream(name="current")
    cuda = SimpleNamespace(
        Event=Event, Stream=Stream, Device=Device, get_current_stream=lambda: current,
        alloc_pinned_memory=lambda nbytes: bytearray(nbytes + 512),
        runtime=SimpleNamespace(memcpyAsync=copy),
    )  # fmt: skip
    module = SimpleNamespace(
        cuda=cuda, empty=lambda shape, dtype: Array(np.empty(shape, dtype)),
        ascontiguousarray=lambda value: Array(np.ascontiguousarray(value.memory)),
        from_dlpack=lambda value: Array(value.memory), asarray=lambda value: Array(value.memory),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_cupy_copies_in_two_streams_that_wait_for_the_programs(cupy):
    pool = StagingPool()
    array = Array(np.arange(1000.0))
    mirror = pool.mirror(CUPY, array)
    assert mirror.load(0, 8000).poll()
    assert mirror.host.tolist() == array.memory.tolist()
    mirror.host *= 2
    mirror.store_all()
    assert array.memory[3] == 6.0
    mirror.finish()
    outward, inward = (stream.name for stream in Stream.made[1:3])
    assert calls[:2] == [("record", "current"), ("wait", outward, "current")]
    assert [call for call in calls if call[0] == "copy"] == [
        ("copy", 2, 8000, outward), ("copy", 1, 8000, inward),
    ]  # fmt: skip
    assert ("wait", inward, "current") in calls
    assert calls[-1] == ("wait", "current", inward), "the program's stream waits for the result"


def test_cupy_reports_errors_of_copies(cupy):
    pool = StagingPool()
    mirror = pool.mirror(CUPY, Array(np.zeros(10)))
    done = mirror.load(0, 80)
    assert done.poll()
    Stream.broken = True
    with pytest.raises(DeviceError, match="IllegalAddress"):
        done.poll()


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
