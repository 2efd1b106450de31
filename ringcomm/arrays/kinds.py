"""Kinds of arrays other than NumPy's: the operations that ringcomm requires of each, found by the type's
name.

A kind is one file that uses its framework through ``sys.modules``: a program that passes such an array has
imported the framework, and ringcomm imports none. :func:`device_kind` is called for every array that is
passed, so for NumPy's it is one look-up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, Callable, Dict, Hashable, Optional, Sequence, Tuple

import numpy as np

from ..collective.mirror import Done
from ..errors import BrokenInvariantError


class CopyEngine(ABC):
    """The copies between one device and the host: a stream for each direction, beside the program's own.

    Copies of one direction are done in the order in which they are started. Any thread may start them.
    """

    @abstractmethod
    def block(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return new page-locked host memory (uint8), which the device copies from and to directly."""

    @abstractmethod
    def mark(self) -> Any:
        """Return a mark behind the pending work of the calling thread's current stream, for ``after``."""

    @abstractmethod
    def to_host(
        self, array: Any, start: int, stop: int, block: np.ndarray[Any, Any], after: Optional[Any]
    ) -> Done:
        """Start copying the bytes ``[start, stop)`` of a flat array to the same bytes of a block. This and
        all later copies of the direction wait on the device for ``after``, a :meth:`mark`.
        """

    @abstractmethod
    def to_device(
        self, block: np.ndarray[Any, Any], array: Any, start: int, stop: int, after: Optional[Any]
    ) -> Done:
        """Start copying the bytes ``[start, stop)`` of a block to the same bytes of a flat array."""

    @abstractmethod
    def follow(self, done: Done) -> None:
        """Let the calling thread's current stream wait for a copy; the thread itself does not wait."""

    def mapped_slowdown(
        self, nbytes: int, measure: Callable[[np.ndarray[Any, Any]], float]
    ) -> Optional[float]:
        """Return how much slower the host adds in mapped memory, by ``measure`` on ``nbytes`` of it (uint8);
        None if the device shares no memory with it.
        """
        del nbytes, measure
        return None

    def reached(self, mark: Any) -> Done:
        """Return a :meth:`mark` as a :class:`Done`; of devices that have mapped memory."""
        raise BrokenInvariantError(f"{type(self).__name__} has no mapped memory, so nothing waits for {mark}")


class DeviceKind(ABC):
    """The operations that ringcomm requires of a type of arrays that devices hold."""

    name: str  # for messages

    @abstractmethod
    def on_device(self, value: Any) -> bool:
        """Return whether a device holds this array; otherwise the host may use it as it is."""

    @abstractmethod
    def device(self, value: Any) -> Hashable:
        """Return the identity of that device."""

    @abstractmethod
    def engine(self, value: Any) -> CopyEngine:
        """Return a new engine for the device of an array."""

    @abstractmethod
    def describe(self, value: Any) -> Tuple[Tuple[int, ...], np.dtype[Any]]:
        """Return shape and element type; raises UnsupportedDtypeError if NumPy has no such type."""

    @abstractmethod
    def flat(self, value: Any) -> Tuple[Any, bool]:
        """Return the elements as a flat array in C order, and whether that shares the array's memory."""

    @abstractmethod
    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        """Return a new array on the same device and of the same element type."""

    @abstractmethod
    def assign(self, target: Any, source: Any) -> None:
        """Copy an array to another one of the same shape, in order with the program's own work."""

    def reshaped(self, flat: Any, shape: Sequence[int]) -> Any:
        """Return a flat array in another shape, with the same memory."""
        return flat.reshape(tuple(shape))

    def result(self, array: Any, like: Any) -> Any:
        """Return an array that :meth:`empty` made in the form that the caller gets."""
        del like
        return array

    def host_memory(self, value: Any) -> Optional[np.ndarray[Any, Any]]:
        """Return an array that shares the memory of one that no device holds; None if impossible."""
        del value
        return None

    def mapped(self, flat: Any) -> Optional[np.ndarray[Any, Any]]:
        """Return host-visible memory of a mapped flat array on a device, else None."""
        del flat
        return None

    def check_writable(self, value: Any, what: str) -> None:  # noqa: B027 - most arrays can be written
        """Raise Misuse if the array cannot be overwritten."""


_FILES: Dict[Tuple[str, str], str] = {
    ("torch", "Tensor"): "torch_tensors",
    ("torch", "Parameter"): "torch_tensors",
    ("cupy", "ndarray"): "cupy_arrays",
    ("jaxlib", "ArrayImpl"): "dlpack",
    ("tensorflow", "EagerTensor"): "dlpack",
}
"""The file of a kind by the top-level package and the name of a type or of one of its bases."""

_BY_TYPE: Dict[type, Optional[DeviceKind]] = dict.fromkeys((np.ndarray, list, tuple, float, int, bool))


def device_kind(value: Any) -> Optional[DeviceKind]:
    """Return the kind of an array that a device holds; None if the host may use the array as it is."""
    kind = kind_of(value)
    return kind if kind is not None and kind.on_device(value) else None


def kind_of(value: Any) -> Optional[DeviceKind]:
    """Return the kind of an array, wherever its memory is; None for NumPy's and for objects of no kind."""
    cls = type(value)
    try:
        return _BY_TYPE[cls]
    except KeyError:
        found = _BY_TYPE[cls] = _kind_of_type(cls)
        return found


def register_kind(cls: type, kind: Optional[DeviceKind]) -> None:
    """Register the exact type of arrays: for kinds outside ringcomm, and for tests. ``kind`` None: the host
    may use such arrays as they are.
    """
    _BY_TYPE[cls] = kind


def _kind_of_type(cls: type) -> Optional[DeviceKind]:
    for base in cls.__mro__:
        if base is np.ndarray:
            return None
        if base in _BY_TYPE and _BY_TYPE[base] is not None:
            return _BY_TYPE[base]
        file = _FILES.get((base.__module__.partition(".")[0], base.__name__))
        if file is not None:
            return _load(file)
    if hasattr(cls, "__cuda_array_interface__") or hasattr(cls, "__dlpack_device__"):
        return _load("dlpack")
    return None


def _load(file: str) -> DeviceKind:
    kind: DeviceKind = import_module(f"{__package__}.{file}").KIND
    return kind
