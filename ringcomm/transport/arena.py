"""Memory of this process that the other ranks of its host have mapped as well.

A rank that lends memory of its arena announces only the place: the other rank adds or copies it from its own
mapping, without a system call. The memory is one file without a name, whose descriptor goes to each peer of
the host when a link is made. So nothing remains of it, however the processes end. It consists of blocks,
whose pages are reserved when a block is made and given back when the last array over it is gone.

A forked process has the same memory, as with any shared memory, but cannot give it back; its own blocks lie
in another file.

Other buffers are read by ``process_vm_readv``, which looks every page up; :class:`HugePages` makes that
faster.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from pathlib import Path
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from ..dtypes import Array

MIN_BYTES = 512 * 1024
"""Shorter buffers go through the ring, which is as fast there; so shorter arrays are ordinary memory."""
_UNIT = mmap.ALLOCATIONGRANULARITY
_GIVE_BACK: Any = getattr(mmap, "MADV_REMOVE", None)  # Not every system has it.
_ADD_SEALS, _GET_SEALS, _SEAL_SHRINK = 1033, 1034, 2  # of fcntl; Python has them on Linux only


def nameless() -> int:
    """Return a descriptor of anonymous memory that no process can shrink; raises OSError where there is none.
    """
    try:
        import fcntl

        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING  # type: ignore[attr-defined,unused-ignore]
        descriptor: int = os.memfd_create("ringcomm", flags)  # type: ignore[attr-defined,unused-ignore]
    except (ImportError, AttributeError):
        raise OSError("this system has no shared memory without a name") from None
    try:
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Return whether no process can shrink a file: reading beyond its end would kill this one (SIGBUS)."""
    import fcntl

    try:
        return bool(fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK)
    except OSError:
        return False  # No file of this kind has seals.


class _Block(NamedTuple):
    """A part of the file, and where this process has mapped it."""

    offset: int
    length: int
    address: int
    map: mmap.mmap


class Arena:
    """Blocks of shared memory of this process; raises OSError where the system has none."""

    def __init__(self) -> None:
        if not hasattr(os, "posix_fallocate") or _GIVE_BACK is None:
            raise OSError("this system does not reserve memory and give it back")
        self.descriptor = nameless()
        self.has_peers = False  # whether another rank of this host has, or had, the descriptor
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._size = 0
        # By address, with their addresses; read without the lock, so both are replaced in one step.
        self._index: Tuple[Tuple[int, ...], Tuple[_Block, ...]] = (), ()
        self._holes: Dict[int, List[int]] = {}  # by length, where in the file blocks have been given back
        self._gone: Deque[_Block] = deque()

    def allocate(self, nbytes: int) -> Array:
        """Return new zeroed bytes, which arrays over them keep alive; raises OSError if memory is used up."""
        self._collect()
        assert hasattr(os, "posix_fallocate")  # otherwise there is no arena
        with self._lock:
            # Few lengths, so that released blocks fit again: eight from a power of two to the next.
            step = max(_UNIT, 1 << max(0, nbytes.bit_length() - 4))
            length = -(-nbytes // step) * step
            holes = self._holes.setdefault(length, [])
            offset = holes[-1] if holes else self._size
            os.posix_fallocate(self.descriptor, offset, length)  # missing memory would be a SIGBUS later
            memory = mmap.mmap(self.descriptor, length, offset=offset)
            if holes:
                holes.pop()
            else:
                self._size += length
            # This object ends with the last array over it. (A mapping could not be used again after it.)
            owner = (ctypes.c_ubyte * length).from_buffer(memory)
            block = _Block(offset, length, ctypes.addressof(owner), memory)
            self._replace((*self._index[1], block))
            weakref.finalize(owner, self._give_back, block).atexit = False
        return np.frombuffer(owner, np.uint8, nbytes)  # type: ignore[call-overload]

    def _give_back(self, block: _Block) -> None:
        """Called by Python, perhaps while this very thread allocates."""
        if os.getpid() == self._owner:
            self._gone.append(block)
            self._collect()

    def _collect(self) -> None:
        """Give back the pages of released blocks, unless another call is doing so."""
        while self._gone and self._lock.acquire(blocking=False):
            try:
                block = self._gone.popleft()
                self._replace(tuple(item for item in self._index[1] if item is not block))
                block.map.madvise(_GIVE_BACK)
                self._holes[block.length].append(block.offset)
            except IndexError:
                return
            finally:
                self._lock.release()

    def _replace(self, blocks: Tuple[_Block, ...]) -> None:
        blocks = tuple(sorted(blocks, key=lambda block: block.address))
        self._index = tuple(block.address for block in blocks), blocks

    def __contains__(self, array: Array) -> bool:
        return self.offset_of(array.__array_interface__["data"][0], array.nbytes) is not None

    def offset_of(self, address: int, nbytes: int) -> Optional[int]:
        """Return the offset of bytes in the file, or None if they lie elsewhere. For any thread."""
        starts, blocks = self._index
        place = bisect_right(starts, address) - 1
        if place < 0:
            return None
        block = blocks[place]
        inside = address - block.address
        if inside + nbytes <= block.length:
            return block.offset + inside
        return None


class PeerArena:
    """The memory of another process's :class:`Arena`, read-only; owns the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._whole: memoryview = memoryview(b"")
        weakref.finalize(self, os.close, descriptor).atexit = False

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes; raises OSError beyond the file, or without address space. For any thread."""
        whole = self._whole
        if offset + nbytes > whole.nbytes:
            size = os.fstat(self._descriptor).st_size
            if offset + nbytes > size:
                raise OSError("there is no such memory")
            whole = self._whole = memoryview(mmap.mmap(self._descriptor, size, access=mmap.ACCESS_READ))
        return whole[offset : offset + nbytes]


_own: Optional[Arena] = None
_known: weakref.WeakValueDictionary[Tuple[int, int], PeerArena] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _forget() -> None:
    """Drop the arena in a forked process: it is its parent's."""
    global _own, _lock
    _own, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def own() -> Optional[Arena]:
    """Return the arena of this process, made by the first call; None where there cannot be one."""
    global _own
    with _lock:
        if _own is None:
            try:
                _own = Arena()
            except OSError:
                return None
        return _own


def of_peer(descriptor: int) -> PeerArena:
    """Return the arena of this descriptor, which it owns: one object for all links to a process."""
    state = os.fstat(descriptor)
    key = (state.st_dev, state.st_ino)
    with _lock:
        found = _known.get(key)
        if found is None:
            found = _known[key] = PeerArena(descriptor)
        else:
            os.close(descriptor)
        return found


def shared_room(nbytes: int) -> Optional[Array]:
    """Return zeroed shared memory for a buffer of ringcomm's own, or None where ordinary memory is as good.
    """
    if nbytes < MIN_BYTES or _own is None or not _own.has_peers:
        return None
    try:
        return _own.allocate(nbytes)
    except (OSError, ValueError):
        return None


def empty(shape: Any, dtype: Any = np.float32) -> Array:
    """Return a new array in memory that the other ranks of this host can read directly.

    Between ranks of one host, large collectives on such arrays are faster, because a reduction adds directly
    from the other rank's memory. In all other respects they are ordinary NumPy arrays; ``torch.from_numpy``
    makes tensors of them. You can use them after the end of the job. A forked process shares them with its
    parent.

    Args:
        shape: an integer, or a tuple of them.
        dtype: the element type, in any form that NumPy accepts.

    Returns:
        an array in C order with arbitrary elements. It is in ordinary memory if it is shorter than 512 KiB,
        or if this system has no such memory (left).

    Raises:
        ValueError, TypeError: in the same cases as ``numpy.empty``.

    Example::

        x = rc.empty(1_000_000)
        x[:] = gradient
        rc.allreduce_(x)
    """
    array: Array = np.empty(shape, dtype)
    if array.nbytes < MIN_BYTES or array.dtype.hasobject:
        return array
    arena = own()
    try:
        memory = None if arena is None else arena.allocate(array.nbytes)
    except (OSError, ValueError):
        return array
    return array if memory is None else memory.view(array.dtype).reshape(array.shape)


# -- huge pages ------------------------------------------------------------------------------------

HUGE_BYTES = 2 * 1024 * 1024
USES = 3
"""Moving existing pages (``MADV_COLLAPSE``, Linux 6.1) costs as much as a few collectives gain: 25 MiB take
3.6 instead of 5.9 ms. NumPy asks for huge pages for large arrays; PyTorch, whose memory gradients are, does
not."""
_COLLAPSE = 25
_KEPT = 512
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HugePages:
    """Counts the uses of large buffers, and moves those that come again to huge pages."""

    def __init__(self) -> None:
        self._uses: Dict[Tuple[int, int], int] = {}
        self._madvise: Any = None  # None where huge pages are forbidden
        try:
            if "[never]" not in _POLICY.read_text():
                self._madvise = ctypes.CDLL(None).madvise
                self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        except (OSError, AttributeError, TypeError):
            pass

    def use(self, address: int, nbytes: int) -> None:
        """Count the use of a buffer of at least :data:`~.base.LARGE_BYTES`. Its contents stay the same."""
        if self._madvise is None:
            return
        uses = self._uses[address, nbytes] = self._uses.pop((address, nbytes), 0) + 1
        if len(self._uses) > _KEPT:
            del self._uses[next(iter(self._uses))]
        if uses == USES:
            start = -(-address // HUGE_BYTES) * HUGE_BYTES
            length = (address + nbytes) // HUGE_BYTES * HUGE_BYTES - start
            if length > 0:
                self._madvise(start, length, _COLLAPSE)  # Where it is refused, all stays as it is.
