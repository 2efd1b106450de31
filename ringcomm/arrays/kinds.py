"""Arrays other than NumPy's: the operations that ringcomm requires of each kind, and mirrors of those on
devices.

A kind is in a file that uses its framework through ``sys.modules``: a program that passes such an array has
imported the framework, and ringcomm imports none. :func:`device_kind` is called for every array that is
passed, so for NumPy's it is one look-up.

**Mirrors** are blocks of page-locked host memory through which arrays on devices are sent. A collective runs
on the block. Its input is copied there before (:meth:`BlockMirror.fetch`), and its result back after it
(:meth:`BlockMirror.store`). Copies are asynchronous: the calling thread waits for those that it must send,
and never for those back, because the mirror keeps its block until they are done and the program's stream
waits for them on the device.

Copies of one array overlap with those of others, and with their collectives, not with its own: on an H200
they take a tenth of the time of the network, and cutting collectives into pieces that follow the copies made
them twice as slow (``benchmarks/results/device.json``).

Locking memory takes milliseconds, so blocks are kept: one pool for a context, in size classes. A released
block is used again when the copies that use it are done; nothing waits for that.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from importlib import import_module
from typing import Any, Callable, Deque, Dict, Hashable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import Array
from ..errors import DeviceError

logger = logging.getLogger("ringcomm")


class Done:
    """The end of work that a device does by itself, such as a copy; ``is_done`` raises RuntimeError."""

    __slots__ = ("event", "is_done")

    def __init__(self, event: Any, is_done: Callable[[], Any]) -> None:
        self.event = event
        self.is_done = is_done

    def poll(self) -> bool:
        """Return whether it is done; raises DeviceError if it failed."""
        try:
            return bool(self.is_done())
        except RuntimeError as problem:  # of which CuPy's own errors are subclasses
            raise DeviceError(f"a copy has failed on the device: {problem}") from problem


Wait = Callable[[Done], None]  # waits for a copy; may raise an error instead


class CopyEngine(ABC):
    """The copies between one device and the host, for any thread: a stream for each direction, in order."""

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
        """Start copying bytes of a flat array to the same place of a block, on the device after a mark."""

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
    """Register the exact type of arrays; ``kind`` None: the host may use such arrays as they are."""
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
    return getattr(import_module(f"{__package__}.{file}"), name)


# -- mirrors ------------------------------------------------------------------------------------------

_MIN_BLOCK_BYTES = 4096


def block_bytes(nbytes: int) -> int:
    """Return the size class of a block: at most a quarter more than needed, from 4096 bytes on.

    >>> block_bytes(10), block_bytes(5000), block_bytes(25_000_000)
    (4096, 5120, 25165824)
    """
    if nbytes <= _MIN_BLOCK_BYTES:
        return _MIN_BLOCK_BYTES
    step = 1 << max(0, (nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class _Returned(NamedTuple):
    """A block that has been given back."""

    engine: CopyEngine
    block: Array
    pending: Sequence[Done]  # the last copies that use it
    arrays: Sequence[Any]  # on the device, kept alive until these are done


class StagingPool:
    """The page-locked memory and the copy engines of one context. For any thread."""

    def __init__(self) -> None:
        self.allocations = 0  # blocks made so far
        self._engines: Dict[Hashable, CopyEngine] = {}
        self._free: Dict[Tuple[int, int], List[Array]] = {}
        # Appended to by finalizers too, so without a lock.
        self._returned: Deque[_Returned] = deque()

    def engine(self, kind: DeviceKind, value: Any) -> CopyEngine:
        """Return the engine of the device that holds an array."""
        key = (kind.name, kind.device(value))
        engine = self._engines.get(key)
        if engine is None:
            engine = self._engines.setdefault(key, kind.engine(value))
        return engine

    def mirror(
        self, kind: DeviceKind, source: Any, target: Optional[Any] = None, target_start: int = 0
    ) -> BlockMirror:
        """Return a mirror that copies a flat array to the host, and back to ``target`` from an element on."""
        (count,), dtype = kind.describe(source)
        engine = self.engine(kind, source)
        first = target_start * dtype.itemsize
        return BlockMirror(self, engine, source, source if target is None else target, count, dtype, first)

    def take(self, engine: CopyEngine, nbytes: int) -> Array:
        """Return a block of at least ``nbytes`` that no copy uses; DeviceError if an earlier copy failed."""
        self._collect()
        size = block_bytes(nbytes)
        free = self._free.get((id(engine), size))
        while free:
            try:
                return free.pop()
            except IndexError:
                break  # Another thread was faster.
        self.allocations += 1
        return engine.block(size)

    def give(self, returned: _Returned) -> None:
        """Give a block back."""
        self._returned.append(returned)

    def _collect(self) -> None:
        for _ in range(len(self._returned)):
            try:
                item = self._returned.popleft()
            except IndexError:
                return
            if all(done.poll() for done in item.pending):
                self._free.setdefault((id(item.engine), item.block.nbytes), []).append(item.block)
            else:
                self._returned.append(item)


class BlockMirror:
    """A flat array on a device, and a block; the pending work of the thread's stream precedes all copies."""

    host: Array  # as many elements, flat; defined only after a load
    shared = False  # ``host`` is the array itself; no writing to it before :meth:`fetch` has returned

    def __init__(
        self,
        pool: StagingPool,
        engine: CopyEngine,
        source: Any,
        target: Any,
        count: int,
        dtype: np.dtype[Any],
        target_start: int = 0,
    ) -> None:
        self._block: Optional[Array] = None
        self._pool = pool
        self._engine = engine
        self._source = source
        self._target = target
        self._target_start = target_start
        self.nbytes = count * dtype.itemsize
        self._block = pool.take(engine, self.nbytes)
        self._mark = engine.mark()
        self._marked = [False, False]  # each direction
        self._load: Optional[Done] = None
        self._last_store: Optional[Done] = None
        self._followed = True
        self.host = self._block[: self.nbytes].view(dtype)

    def __del__(self) -> None:
        self.release()

    def _after(self, direction: int) -> Optional[Done]:
        """Return the mark for the first copy of each direction, else None."""
        if self._marked[direction]:
            return None
        self._marked[direction] = True
        return self._mark

    def preload(self) -> None:
        """Start copying the whole array to the host."""
        if self.nbytes:
            self.load(0, self.nbytes)

    def load(self, start: int, stop: int) -> Done:
        """Start copying bytes to the host, unless a load was started before, and return that load."""
        if self._load is None:
            assert self._block is not None
            self._load = self._engine.to_host(self._source, start, stop, self._block, self._after(0))
        return self._load

    def fetch(self, wait: Wait, start: int = 0, stop: Optional[int] = None) -> None:
        """Copy bytes of the array to the host, unless that was begun before, and wait for them."""
        if self.nbytes:
            wait(self.load(start, self.nbytes if stop is None else stop))

    def store(self, start: int, stop: int) -> None:
        """Start copying the bytes ``[start, stop)`` of the host's block to the array."""
        assert self._block is not None
        self._followed = False
        first = self._target_start
        self._last_store = self._engine.to_device(
            self._block[first:], self._target, start - first, stop - first, self._after(1)
        )

    def store_all(self) -> None:
        """Start copying the whole block to the array."""
        if self.nbytes:
            self.store(0, self.nbytes)

    def keep_source(self) -> None:
        """Let the calling thread's current stream wait until the array has been copied to the host."""
        if self._load is not None:
            self._engine.follow(self._load)

    def finish(self) -> None:
        """Let the thread's stream wait for the result, and give the block back. Raises DeviceError."""
        if self._last_store is not None:
            self._last_store.poll()
            self._engine.follow(self._last_store)
        self._followed = True
        self.release()

    def release(self) -> None:
        """Give the block back, without a wait. May be called again."""
        block, self._block = self._block, None
        if block is None:
            return
        pending = [done for done in (self._load, self._last_store) if done is not None]
        arrays = () if self._followed else (self._source, self._target)
        self._pool.give(_Returned(self._engine, block, pending, arrays))


class MappedMirror(BlockMirror):
    """A flat array in memory that the processor and an integrated GPU share: it is its own block."""

    shared = True

    def __init__(self, engine: CopyEngine, host: Array) -> None:
        self._block = None  # the array's owner frees the memory
        self._last_store = None
        self._followed = True
        self.host = host
        self.nbytes = host.nbytes
        # What the calling thread's current stream has still to do: begun already.
        self._load = engine.mark()

    def store(self, start: int, stop: int) -> None:
        """Do nothing: the elements are there already."""

    def keep_source(self) -> None:
        """Do nothing: only arrays that a collective overwrites are used without a copy."""
