"""Arrays on CUDA devices: CuPy's, and those of other libraries through CuPy or PyTorch.

CuPy copies by ``memcpyAsync`` in two streams with events. It has no bfloat16, and does not need the elements'
type here: bytes are copied. It shares the memory of other libraries' arrays by DLPack or
``__cuda_array_interface__``. JAX's and TensorFlow's arrays on a GPU are such arrays; they cannot be
overwritten, and results go back to their libraries by DLPack.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from importlib import import_module
from typing import Any, Hashable, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import Array
from ..errors import DeviceError, Misuse
from .kinds import CopyEngine, DeviceKind, Done, load_kind

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2  # ``cudaMemcpyKind``
_CUDA = 2  # ``kDLCUDA`` among DLPack's devices
_CACHED = 72
"""The least compute capability (7.2) of integrated GPUs whose page-locked memory the processor caches."""
_IMMUTABLE = ("jaxlib", "jax", "tensorflow")


def _cupy() -> Any:
    return sys.modules["cupy"]


def _recorded(event: Any) -> Done:
    return Done(event, lambda: event.done)


class CupyEngine(CopyEngine):
    """Copies of one CUDA device through CuPy."""

    def __init__(self, device: int) -> None:
        cuda = _cupy().cuda
        self.device = f"device {device}"
        self._device = cuda.Device(device)
        with self._device:
            self._out, self._in = cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True)

    def locked(self, nbytes: int) -> Array:
        # The memory is rounded up, so its length is given.
        return np.frombuffer(_cupy().cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def mark(self) -> Done:
        with self._device:
            event = _cupy().cuda.Event(disable_timing=True)
            event.record(_cupy().cuda.get_current_stream())
        return _recorded(event)

    def to_host(self, array: Any, start: int, stop: int, block: Array, after: Optional[Done]) -> Done:
        target, source = block.ctypes.data + start, array.data.ptr + start
        return self._copy(self._out, target, source, stop - start, _DEVICE_TO_HOST, after)

    def to_device(self, block: Array, array: Any, start: int, stop: int, after: Optional[Done]) -> Done:
        target, source = array.data.ptr + start, block.ctypes.data + start
        return self._copy(self._in, target, source, stop - start, _HOST_TO_DEVICE, after)

    def _copy(
        self, stream: Any, target: int, source: int, nbytes: int, direction: int, after: Optional[Done]
    ) -> Done:
        cuda = _cupy().cuda
        try:
            with self._device:
                event = cuda.Event(disable_timing=True)
                if after is not None:
                    stream.wait_event(after.event)
                cuda.runtime.memcpyAsync(target, source, nbytes, direction, stream.ptr)
                event.record(stream)
        except RuntimeError as problem:
            raise DeviceError(f"a copy could not be started on {self.device}: {problem}") from problem
        return _recorded(event)

    def follow(self, done: Done) -> None:
        with self._device:
            _cupy().cuda.get_current_stream().wait_event(done.event)


@lru_cache(maxsize=None)
def _shares_cached_memory(device: int) -> bool:
    """Return whether a device and the processor share memory that both cache, as on a Jetson Orin."""
    found = _cupy().cuda.Device(device)
    return bool(found.attributes.get("Integrated", 0)) and int(found.compute_capability) >= _CACHED


class CupyKind(DeviceKind):
    """``cupy.ndarray``."""

    name = "cupy"

    def on_device(self, value: Any) -> bool:
        return True

    def device(self, value: Any) -> Hashable:
        return int(value.device.id)

    def engine(self, value: Any) -> CopyEngine:
        return CupyEngine(int(value.device.id))

    def describe(self, value: Any) -> Tuple[Tuple[int, ...], np.dtype[Any]]:
        return tuple(value.shape), np.dtype(value.dtype)

    def flat(self, value: Any) -> Tuple[Any, bool]:
        with value.device:
            contiguous = _cupy().ascontiguousarray(value)
        return contiguous.reshape(-1), contiguous.data.ptr == value.data.ptr

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        with like.device:
            return _cupy().empty(tuple(shape), like.dtype)

    def mapped(self, flat: Any) -> Optional[Array]:
        # Managed memory must not be touched while a kernel runs, so the owner must be page-locked memory.
        owner = getattr(flat.data.mem, "_owner", None)
        if type(owner).__name__ not in ("PinnedMemory", "PinnedMemoryPointer") or not flat.nbytes:
            return None
        if not _shares_cached_memory(int(flat.device.id)):
            return None
        memory = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data.ptr)  # one address for both
        return np.frombuffer(memory, np.uint8).view(np.dtype(flat.dtype))

    def assign(self, target: Any, source: Any) -> None:
        with target.device:
            target[...] = source


class DlpackKind(DeviceKind):
    """Any array with ``__cuda_array_interface__``, or with ``__dlpack__`` on a CUDA device."""

    name = "DLPack"

    def on_device(self, value: Any) -> bool:
        if hasattr(value, "__dlpack_device__"):
            try:
                return int(value.__dlpack_device__()[0]) == _CUDA
            except Exception:  # noqa: BLE001 - an array that cannot say is one that is not exported
                return False
        return hasattr(value, "__cuda_array_interface__")

    def _native(self, value: Any) -> Tuple[DeviceKind, Any]:
        """Return the array as one of CuPy or PyTorch that shares its memory, and the kind of that one."""
        library, exported = _library_of(value), hasattr(value, "__dlpack__")
        if library == "cupy":
            return KIND, value
        if library == "torch":
            return load_kind("torch_tensors"), value
        cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
        if cupy is None and torch is not None and torch.cuda.is_available():
            shared = torch.from_dlpack(value) if exported else torch.as_tensor(value, device="cuda")
            return load_kind("torch_tensors"), shared
        try:
            cupy = import_module("cupy")
        except ImportError:
            raise Misuse(
                f"An array of {library} on a GPU is sent through CuPy or PyTorch, and neither is there: "
                "pip install cupy-cuda12x, or pass an array in host memory."
            ) from None
        return KIND, cupy.from_dlpack(value) if exported else cupy.asarray(value)

    def device(self, value: Any) -> Hashable:
        kind, shared = self._native(value)
        return (kind.name, kind.device(shared))

    def engine(self, value: Any) -> CopyEngine:
        kind, shared = self._native(value)
        return kind.engine(shared)

    def describe(self, value: Any) -> Tuple[Tuple[int, ...], np.dtype[Any]]:
        kind, shared = self._native(value)
        return kind.describe(shared)

    def flat(self, value: Any) -> Tuple[Any, bool]:
        kind, shared = self._native(value)
        return kind.flat(shared)

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        kind, shared = self._native(like)
        return kind.empty(shared, shape)

    def assign(self, target: Any, source: Any) -> None:
        kind, shared = self._native(target)
        kind.assign(shared, self._native(source)[1])

    def result(self, array: Any, like: Any) -> Any:
        library = _library_of(like)
        if library in ("jaxlib", "jax"):
            return sys.modules["jax"].dlpack.from_dlpack(array)
        if library == "tensorflow":
            return sys.modules["tensorflow"].experimental.dlpack.from_dlpack(array.__dlpack__())
        return array

    def check_writable(self, value: Any, what: str) -> None:
        if _library_of(value) in _IMMUTABLE:
            raise Misuse(
                f"{what} works in place, and arrays of {_library_of(value)} cannot be overwritten. Without "
                "the trailing underscore it returns a new array."
            )


def _library_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


KIND = CupyKind()
DLPACK = DlpackKind()
