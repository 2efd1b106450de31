"""Groups of CUDA devices: NCCL, through its C interface, for the arrays of any library.

The library is the one that PyTorch or CuPy has loaded, or that is installed as ``nvidia.nccl``; through
``ctypes`` it takes arrays of both, and calls of it release the interpreter's lock. A communicator of NCCL is
made from an identifier, which the first rank of a host makes and sends over ringcomm's own links.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, ContextManager, Tuple, Union

from ..collective.device_group import TICKET_BYTES, DeviceGroup, DevicePort
from ..collective.mirror import Done
from ..dtypes import dtype_named
from ..errors import DeviceError
from ..ops import ReduceOp

_TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
"""``ncclDataType_t``."""
_OPS = {ReduceOp.SUM: 0, ReduceOp.AVERAGE: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
"""``ncclRedOp_t``."""
_ABORT_AFTER_S = 2.0
"""So long an abort waits for a call of another thread."""
_NAMES = ("libnccl.so.2", "libnccl.so")


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * TICKET_BYTES),)


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT),
    "ncclCommAbort": (_POINTER,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclReduceScatter": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ncclBroadcast": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
}


class Nccl:
    """The library, each of whose calls raises DeviceError if it fails.

    Args:
        library: as ``ctypes`` has loaded it.

    Attributes:
        version: like 22105 for 2.21.5.

    Raises:
        DeviceError: it lacks a function, or does not answer.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        try:
            for name, arguments in _SIGNATURES.items():
                getattr(library, name).argtypes = arguments
            library.ncclGetErrorString.restype = ctypes.c_char_p
        except AttributeError as problem:
            raise DeviceError(f"NCCL lacks a function: {problem}") from problem
        version = _INT()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            DeviceError: its result is not ``ncclSuccess``.
        """
        result = getattr(self._library, name)(*arguments)
        if result:
            text = self._library.ncclGetErrorString(result).decode()
            raise DeviceError(f"{name} failed: {text}. NCCL_DEBUG=WARN in the environment says more")


@lru_cache(maxsize=None)
def find_nccl() -> Union[Nccl, str]:
    """The library of this process, or why there is none."""
    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    places = list(found.submodule_search_locations or ()) if found is not None else []
    installed = [str(Path(place) / "lib" / _NAMES[0]) for place in places]
    problems = []
    for name in (*_NAMES, *installed):
        try:
            return Nccl(ctypes.CDLL(name))
        except (OSError, DeviceError) as problem:
            problems.append(str(problem))
    return f"NCCL cannot be used ({problems[0]})"


def identity_of(uuid: str) -> int:
    """A device's number for comparisons, from its UUID as text; 0 if that is empty."""
    return int(hashlib.sha256(uuid.lower().encode()).hexdigest()[:15], 16) if uuid.strip("0-") else 0


class CudaStream(ABC):
    """A stream of a library that has CUDA arrays, for work beside the program's.

    Attributes:
        handle: its ``cudaStream_t``.
    """

    handle: int

    @abstractmethod
    def current(self) -> ContextManager[Any]:
        """A ``with`` block in which it is the calling thread's current stream, on its device."""

    @abstractmethod
    def follow(self, mark: Any) -> None:
        """Do what is queued from now on after an event only."""

    @abstractmethod
    def done(self) -> Done:
        """The end of all that has been queued."""

    @abstractmethod
    def keep(self, array: Any) -> Tuple[int, str]:
        """Use an array in this stream: its address, and the name of its elements' type."""


class NcclPort(DevicePort):
    """The way of one CUDA device into groups.

    Args:
        nccl: the library.
        stream: for the work of groups.
        identity: of the device.
    """

    def __init__(self, nccl: Nccl, stream: CudaStream, identity: int) -> None:
        major, rest = divmod(nccl.version, 10_000)
        self.name = f"NCCL {major}.{rest // 100}.{rest % 100}"
        self.version = nccl.version
        self.identity = identity
        self._nccl = nccl
        self._stream = stream

    def ticket(self) -> bytes:
        made = _UniqueId()
        with self._stream.current():
            self._nccl.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def join(self, ticket: bytes, rank: int, size: int) -> DeviceGroup:
        communicator = _POINTER()
        unique = _UniqueId.from_buffer_copy(ticket)
        with self._stream.current():
            self._nccl.call("ncclCommInitRank", ctypes.byref(communicator), size, unique, rank)
        return NcclGroup(self._nccl, communicator, self._stream, rank)


class NcclGroup(DeviceGroup):
    """A communicator of NCCL. Made by :meth:`NcclPort.join`.

    Args:
        nccl: the library.
        communicator: an ``ncclComm_t``.
        stream: in which it works.
        rank: this member's number.
    """

    def __init__(self, nccl: Nccl, communicator: Any, stream: CudaStream, rank: int) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._stream = stream
        self._rank = rank
        self._lock = Lock()
        self._aborted = False

    def current(self) -> ContextManager[Any]:
        return self._stream.current()

    def follow(self, mark: Any) -> None:
        self._stream.follow(mark)

    def queued(self) -> Done:
        return self._stream.done()

    def all_reduce(self, array: Any, op: ReduceOp) -> None:
        at, item, kind = self._used(array)
        self._queue(("ncclAllReduce", at, at, array.nbytes // item, kind, _OPS[op]))

    def reduce_scatter(self, array: Any, bounds: Tuple[int, ...], op: ReduceOp) -> None:
        at, item, kind = self._used(array)
        each, last = bounds[1], len(bounds) - 2
        rest = at + (last + 1) * each * item
        into = at + self._rank * each * item
        calls: Any = [("ncclReduceScatter", at, into, each, kind, _OPS[op])]
        if bounds[-1] > (last + 1) * each:
            calls.append(("ncclReduce", rest, rest, bounds[-1] - (last + 1) * each, kind, _OPS[op], last))
        self._queue(*calls)

    def all_gather(self, array: Any, bounds: Tuple[int, ...]) -> None:
        at, item, kind = self._used(array)
        each, last = bounds[1], len(bounds) - 2
        rest = at + (last + 1) * each * item
        calls: Any = [("ncclAllGather", at + self._rank * each * item, at, each, kind)]
        if bounds[-1] > (last + 1) * each:
            calls.append(("ncclBroadcast", rest, rest, bounds[-1] - (last + 1) * each, kind, last))
        self._queue(*calls)

    def scale(self, array: Any, divisor: int, factor: float) -> None:
        with self._stream.current():
            self._stream.keep(array)
            if divisor != 1:
                array /= divisor
            if factor != 1.0:
                array *= factor

    def abort(self) -> None:
        # A call of NCCL that connects, or whose queue is full, waits for other members and holds the lock.
        held = self._lock.acquire(timeout=_ABORT_AFTER_S)
        try:
            if self._aborted:
                return
            self._aborted = True
            with self._stream.current():
                self._nccl.call("ncclCommAbort", self._communicator)
        finally:
            if held:
                self._lock.release()

    def _used(self, array: Any) -> Tuple[int, int, int]:
        """An array's address, and the length and the number of the type of its elements."""
        at, name = self._stream.keep(array)
        if name not in _TYPES:
            raise DeviceError(f"NCCL has no elements of type {name}")
        return at, dtype_named(name).itemsize, _TYPES[name]

    def _queue(self, *calls: Tuple[Any, ...]) -> None:
        """Queue calls as one; the communicator and the stream are their last arguments."""
        with self._lock, self._stream.current():
            if self._aborted:
                raise DeviceError("the group of devices was aborted")
            self._nccl.call("ncclGroupStart")
            try:
                for name, *arguments in calls:
                    self._nccl.call(name, *arguments, self._communicator, self._stream.handle)
            finally:
                self._nccl.call("ncclGroupEnd")
