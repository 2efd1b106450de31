"""Mirrors: blocks of page-locked host memory through which arrays on devices are sent.

A collective runs on the block. Its input is copied there before (:meth:`BlockMirror.fetch`), and its result
back after it (:meth:`BlockMirror.store`). Copies are asynchronous: the calling thread waits for those that it
must send, and never for those back, because the mirror keeps its block until they are done and the program's
stream waits for them on the device.

Copies of one array overlap with those of others, and with their collectives, not with its own: on an H200
they take a tenth of the time of the network, and cutting collectives into pieces that follow the copies made
them twice as slow (``benchmarks/results/device.json``).

Locking memory takes milliseconds, so blocks are kept: one pool for a context, in size classes. A released
block is used again when the copies that use it are done; nothing waits for that.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, Hashable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import Array
from .kinds import CopyEngine, DeviceKind, Done, Wait

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
        """Return a mirror that copies a flat array on a device to the host, and back to ``target`` or else to
        ``source``, where the target begins at element ``target_start``.
        """
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
    """A flat array on a device, and a block of the pool. Made by :meth:`StagingPool.mirror`.

    The pending work of the calling thread's current stream comes before all copies. ``target_start`` is in
    bytes.
    """

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
        """Let the calling thread's current stream wait for the result, and give the block back. Raises
        DeviceError if a copy has failed already.
        """
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
    """A flat array that is its own block, in memory that the processor and an integrated GPU share: a load
    waits for the program's stream, a store does nothing.
    """

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
