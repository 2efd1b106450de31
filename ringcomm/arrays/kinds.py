"""Kinds of arrays that are not NumPy's: what ringcomm requires of each, found by the type's name.

A kind is one file that uses its framework through ``sys.modules``: a program that passes such an array has
imported the framework, and ringcomm imports none. :func:`device_kind` is asked for every array that is
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
        """New host memory (uint8) that the device copies from and to without a detour: page-locked."""

    @abstractmethod
    def mark(self) -> Any:
        """Return what the calling thread's current stream has still to do, for ``after``."""

    @abstractmethod
    def to_host(
        self, array: Any, start: int, stop: int, block: np.ndarray[Any, Any], after: Optional[Any]
    ) -> Done:
        """Start copying the bytes ``[start, stop)`` of a flat array to the same bytes of a block.

        Args:
            after: a :meth:`mark` that this and all later copies of the direction wait for, on the device.
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
        """Return how much slower the host adds in mapped memory; None if the device shares no memory with it.

        Args:
            nbytes: how much memory to measure with.
            measure: the measurement on mapped memory (uint8).
        """
        del nbytes, measure
        return None

    def reached(self, mark: Any) -> Done:
        """A :meth:`mark` as something to wait for; of devices that have mapped memory."""
        raise BrokenInvariantError(f"{type(self).__name__} has no mapped memory, so nothing waits for {mark}")


class DeviceKind(ABC):
    """What ringcomm requires of a type of arrays that devices hold.

    Attributes:
        name: of the kind, for messages.
    """

    name: str

    @abstractmethod
    def on_device(self, value: Any) -> bool:
        """Return whether a device holds this array; otherwise the host may use it as it is."""

    @abstractmethod
    def device(self, value: Any) -> Hashable:
        """Return which device that is."""

    @abstractmethod
    def engine(self, value: Any) -> CopyEngine:
        """A new engine for the device of an array."""

    @abstractmethod
    def describe(self, value: Any) -> Tuple[Tuple[int, ...], np.dtype[Any]]:
        """Shape and element type.

        Raises:
            UnsupportedDtypeError: NumPy has no such type.
        """

    @abstractmethod
    def flat(self, value: Any) -> Tuple[Any, bool]:
        """The elements as a flat array in C order, and whether that shares the array's memory."""

    @abstractmethod
    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        """A new array on the same device and of the same element type."""

    @abstractmethod
    def assign(self, target: Any, source: Any) -> None:
        """Copy an array to another one of the same shape, in order with the program's own work."""

    def reshaped(self, flat: Any, shape: Sequence[int]) -> Any:
        """A flat array in another shape, with the same memory."""
        return flat.reshape(tuple(shape))

    def result(self, array: Any, like: Any) -> Any:
        """An array that :meth:`empty` made, as the caller gets it."""
        del like
        return array

    def host_memory(self, value: Any) -> Optional[np.ndarray[Any, Any]]:
        """An array that shares the memory of one that no device holds; None if that is not possible."""
        del value
        return None

    def mapped(self, flat: Any) -> Optional[np.ndarray[Any, Any]]:
        """The memory of a flat array on a device, if it is mapped: the host may use it; None otherwise."""
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
    """The kind of an array that a device holds; None if the host may use the array as it is."""
    kind = kind_of(value)
    return kind if kind is not None and kind.on_device(value) else None


def kind_of(value: Any) -> Optional[DeviceKind]:
    """The kind of an array, wherever its memory is; None for NumPy's and for whatever has no kind."""
    cls = type(value)
    try:
        return _BY_TYPE[cls]
    except KeyError:
        found = _BY_TYPE[cls] = _kind_of_type(cls)
        return found


def register_kind(cls: type, kind: Optional[DeviceKind]) -> None:
    """Make a type known: for kinds outside ringcomm, and for tests.

    Args:
        cls: the exact type of the arrays.
        kind: what is to be known of it; None: the host may use such arrays as they are.
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
