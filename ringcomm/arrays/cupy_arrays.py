"""CuPy's arrays: copies by ``memcpyAsync`` in two streams, events, page-locked blocks.

CuPy has no bfloat16, and does not need the elements' type here: bytes are copied.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import lru_cache
from typing import Any, Callable, Hashable, Optional, Sequence, Tuple

import numpy as np

from ..collective.mirror import Done
from ..errors import DeviceError
from .kinds import CopyEngine, DeviceKind

logger = logging.getLogger("ringcomm")

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
"""``cudaMemcpyKind``."""


def _cupy() -> Any:
    return sys.modules["cupy"]


class _Recorded(Done):
    """The work of a stream before an event."""

    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def poll(self) -> bool:
        try:
            return bool(self.event.done)
        except RuntimeError as problem:  # of which CuPy's own errors are subclasses
            raise DeviceError(f"a copy has failed on the device: {problem}") from problem


class CupyEngine(CopyEngine):
    """Copies of one CUDA device through CuPy."""

    def __init__(self, device: int) -> None:
        cuda = _cupy().cuda
        self._device = cuda.Device(device)
        self._pageable = False
        with self._device:
            self._out, self._in = cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True)

    def block(self, nbytes: int) -> np.ndarray[Any, Any]:
        if not self._pageable:
            try:
                memory = _cupy().cuda.alloc_pinned_memory(nbytes)  # rounded up, so its length is given
                return np.frombuffer(memory, np.uint8, nbytes)
            except (RuntimeError, MemoryError) as problem:
                self._pageable = True
                logger.warning(
                    "Memory cannot be page-locked (%s), so copies to and from device %d are slower, and do "
                    "not overlap with the program. In a container, raise its limit: --ulimit memlock=-1.",
                    problem, self._device.id,
                )  # fmt: skip
        return np.empty(nbytes, np.uint8)

    def mark(self) -> Any:
        with self._device:
            event = _cupy().cuda.Event(disable_timing=True)
            event.record(_cupy().cuda.get_current_stream())
        return event

    def to_host(
        self, array: Any, start: int, stop: int, block: np.ndarray[Any, Any], after: Optional[Any]
    ) -> Done:
        target, source = block.ctypes.data + start, array.data.ptr + start
        return self._copy(self._out, target, source, stop - start, _DEVICE_TO_HOST, after)

    def to_device(
        self, block: np.ndarray[Any, Any], array: Any, start: int, stop: int, after: Optional[Any]
    ) -> Done:
        target, source = array.data.ptr + start, block.ctypes.data + start
        return self._copy(self._in, target, source, stop - start, _HOST_TO_DEVICE, after)

    def _copy(
        self, stream: Any, target: int, source: int, nbytes: int, direction: int, after: Optional[Any]
    ) -> Done:
        cuda = _cupy().cuda
        try:
            with self._device:
                event = cuda.Event(disable_timing=True)
                if after is not None:
                    stream.wait_event(after)
                cuda.runtime.memcpyAsync(target, source, nbytes, direction, stream.ptr)
                event.record(stream)
        except RuntimeError as problem:
            raise DeviceError(
                f"a copy could not be started on device {self._device.id}: {problem}"
            ) from problem
        return _Recorded(event)

    def follow(self, done: Done) -> None:
        assert isinstance(done, _Recorded)
        with self._device:
            _cupy().cuda.get_current_stream().wait_event(done.event)

    def mapped_slowdown(
        self, nbytes: int, measure: Callable[[np.ndarray[Any, Any]], float]
    ) -> Optional[float]:
        block = self.block(nbytes)
        return None if self._pageable or not _integrated(self._device.id) else measure(block)

    def reached(self, mark: Any) -> Done:
        return _Recorded(mark)


@lru_cache(maxsize=None)
def _integrated(device: int) -> bool:
    """Return whether a device shares its memory with the processor, such as a Jetson's."""
    return bool(_cupy().cuda.Device(device).attributes.get("Integrated", 0))


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

    def mapped(self, flat: Any) -> Optional[np.ndarray[Any, Any]]:
        # Managed memory must not be touched while a kernel runs, so the owner must be page-locked memory.
        owner = getattr(flat.data.mem, "_owner", None)
        if type(owner).__name__ not in ("PinnedMemory", "PinnedMemoryPointer") or not flat.nbytes:
            return None
        if not _integrated(int(flat.device.id)):
            return None
        memory = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data.ptr)  # one address for both
        shared: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8).view(np.dtype(flat.dtype))
        return shared

    def assign(self, target: Any, source: Any) -> None:
        with target.device:
            target[...] = source


KIND = CupyKind()
