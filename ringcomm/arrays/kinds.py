"""Kinds of arrays other than NumPy's: the operations that ringcomm requires of each, found by the type's
name.

A kind is in a file that uses its framework through ``sys.modules``: a program that passes such an array has
imported the framework, and ringcomm imports none. :func:`device_kind` is called for every array that is
passed, so for NumPy's it is one look-up.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, Callable, Dict, Hashable, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import Array

logger = logging.getLogger("ringcomm")


class Done(ABC):
    """The end of work that a device does by itself, such as a copy."""

    @abstractmethod
    def poll(self) -> bool:
        """Return whether it is done; raises DeviceError if it failed."""


Wait = Callable[[Done], None]
"""Waits for a copy; may raise an error instead."""


class CopyEngine(ABC):
    """The copies between one device and the host: a stream for each direction, beside the program's own.

    Copies of one direction are done in the order in which they are started. Any thread may start them.
    """

    device: Any  # for messages
    _pageable = False

    def block(self, nbytes: int) -> Array:
        """Return new host memory (uint8), which the device uses directly if it can be page-locked."""
        if not self._pageable:
            try:
                return self.locked(nbytes)
            except (RuntimeError, MemoryError) as problem:
                self._pageable = True
                logger.warning(
                    "Memory cannot be page-locked (%s), so copies to and from %s are slower, and do not "
                    "overlap with the program. In a container, raise its limit: --ulimit memlock=-1.",
                    problem, self.device,
                )  # fmt: skip
        return np.empty(nbytes, np.uint8)

    @abstractmethod
    def locked(self, nbytes: int) -> Array:
        """Return new page-locked host memory (uint8); raises RuntimeError or MemoryError if there is none."""

    @abstractmethod
    def mark(self) -> Done:
        """Return the end of the pending work of the calling thread's current stream."""

    @abstractmethod
    def to_host(self, array: Any, start: int, stop: int, block: Array, after: Optional[Done]) -> Done:
        """Start copying the bytes ``[start, stop)`` of a flat array to the same bytes of a block. This and
        all later copies of the direction wait on the device for ``after``, a :meth:`mark`.
        """

    @abstractmethod
    def to_device(self, block: Array, array: Any, start: int, stop: int, after: Optional[Done]) -> Done:
        """Start copying the bytes ``[start, stop)`` of a block to the same bytes of a flat array."""

    @abstractmethod
    def follow(self, done: Done) -> None:
        """Let the calling thread's current stream wait for a copy; the thread itself does not wait."""


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

    def host_memory(self, value: Any) -> Optional[Array]:
        """Return an array that shares the memory of one that no device holds; None if impossible."""
        del value
        return None

    def mapped(self, flat: Any) -> Optional[Array]:
        """Return the memory of a flat array if the device shares it with the host, which caches it."""
        del flat
        return None

    def check_writable(self, value: Any, what: str) -> None:  # noqa: B027 - most arrays can be written
        """Raise Misuse if the array cannot be overwritten."""


_KINDS: Dict[Tuple[str, str], Tuple[str, str]] = {
    ("torch", "Tensor"): ("torch_tensors", "KIND"),
    ("torch", "Parameter"): ("torch_tensors", "KIND"),
    ("cupy", "ndarray"): ("cupy_arrays", "KIND"),
    ("jaxlib", "ArrayImpl"): ("cupy_arrays", "DLPACK"),
    ("tensorflow", "EagerTensor"): ("cupy_arrays", "DLPACK"),
}
"""File and name of a kind by the top-level package and the name of a type or of one of its bases."""

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
        place = _KINDS.get((base.__module__.partition(".")[0], base.__name__))
        if place is not None:
            return load_kind(*place)
    if hasattr(cls, "__cuda_array_interface__") or hasattr(cls, "__dlpack_device__"):
        return load_kind("cupy_arrays", "DLPACK")
    return None


def load_kind(file: str, name: str = "KIND") -> DeviceKind:
    """Return a kind of this package."""
    kind: DeviceKind = getattr(import_module(f"{__package__}.{file}"), name)
    return kind
