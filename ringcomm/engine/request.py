"""What this rank has submitted: requests, their handles, the bookkeeping until they run, and their record.

**Piggybacked values.** A rank whose caller waits for a few bytes sends them with the announcement of the
operation. If every member has done so, rank 0 combines them, and its responses have the result: only the
messages of the negotiation are sent. If one of them has not (its caller did not wait, or it has joined), the
operation runs as any other, and the piggybacked bytes are dropped. So no rank depends on what the others do.
"""

from __future__ import annotations

import threading
from binascii import a2b_base64, b2a_base64
from collections import deque
from itertools import chain
from typing import Any, Callable, Deque, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ..arrays.kinds import BlockMirror
from ..clock import monotonic
from ..collective.observe import DONE, FAILED, RUNNING, SUBMITTED, Row
from ..collective.reduce import Total, kernel, weigh, weighable
from ..dtypes import Array, dtype_named
from ..errors import DuplicateNameError, ProtocolError, fresh_copy
from ..ops import Collective, ReduceOp
from ..wire.messages import Message
from ..wire.signature import Key, Signature

MAX_SITES = 4096
"""For how many lines of the program rank 0 is told where they are, so that a number stands for each."""
MAX_NUMBERS = 4096
"""Signatures with a higher number are not remembered: they are announced in full each time, as those of a
program that gives each step's tensors new names."""


class Handle:
    """An operation that has been started. ``wait()`` waits for it and returns its result.

    ``on_wait`` replaces :meth:`block`. ``convert`` makes the caller's result when the result is first
    requested. After a reduction, ``absent`` has a bit for each part that no rank had.
    """

    __slots__ = ("_convert", "_gate", "_on_wait", "_result", "absent", "error", "finished", "label")

    def __init__(
        self, label: str, on_wait: Optional[Callable[[Handle, Optional[float], bool], Any]] = None,
        convert: Optional[Callable[[Any], Any]] = None,
    ) -> None:  # fmt: skip
        self.label = label
        self.absent = 0
        self.error: Optional[BaseException] = None  # with which it has failed
        self.finished = False
        self._convert = convert
        # A bare lock, held until the end: a tenth of what an Event costs to make.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._result: Any = None
        self._on_wait = on_wait or Handle.block

    def done(self) -> bool:
        """Return whether the operation has ended, successfully or with an error."""
        return self.finished

    def wait(self, timeout_s: Optional[float] = None) -> Any:
        """Return the result when it is there. TimeoutError: it is not; the operation continues."""
        if not self.finished:
            self._on_wait(self, timeout_s, True)
            if not self.finished:
                raise TimeoutError(f"{self.label} did not finish within {timeout_s:g} s")
        if self.error is not None:
            raise fresh_copy(self.error)
        if self._convert is not None:
            # Once, in the thread that requests the result. Others sleep meanwhile, and convert it themselves
            # if that has failed. The gate is free since the operation has come to its end.
            with self._gate:
                convert = self._convert
                if convert is not None:
                    self._result = convert(self._result)
                    self._convert = None
        return self._result

    def attend(self) -> None:
        """Wait for the end like :meth:`wait`, without a report to rank 0, a result or an error."""
        if not self.finished:
            self._on_wait(self, None, False)

    def block(self, timeout_s: Optional[float], reports: bool = False) -> bool:
        """Sleep until the end, or for ``timeout_s``; return whether the operation has ended."""
        if not self.finished and self._gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._gate.release()
        return self.finished

    def finish(self, result: Any = None, error: Optional[BaseException] = None) -> None:
        """End the operation. Called once, by ringcomm."""
        self._result, self.error = result, error
        self.finished = True
        self._gate.release()


_new = tuple.__new__  # of a named tuple: a quarter of the time


class Request:
    """One operation of this rank, and what is recorded of it. ``arrays`` are flat and contiguous; reductions
    and broadcasts overwrite them. ``rows`` are those of each array of an allgather, ``splits`` those for each
    member of an alltoall. ``weight`` is this rank's, ``total`` the sum of all ranks' once rank 0 has sent it.
    ``absent`` has a bit for each part of the contribution that this rank does not have and has filled with
    zeros, then those that no rank has. ``residuals`` are float32, of error feedback. ``mirrors`` are those of
    arrays on devices, of which ``arrays`` are the host blocks (None: in host memory).
    """

    __slots__ = (
        "absent", "arrays", "began_s", "ended_s", "error", "handle", "key", "mirrors", "number", "residuals",
        "rows", "signature", "site", "splits", "submitted_s", "total", "urgent", "weight",
    )  # fmt: skip

    def __init__(
        self, signature: Signature, arrays: Sequence[Array], handle: Handle, site: str = "",
        weight: float = 1.0, absent: int = 0, rows: Sequence[int] = (), splits: Sequence[int] = (),
        residuals: Sequence[Array] = (), mirrors: Sequence[Optional[BlockMirror]] = (),
    ) -> None:  # fmt: skip
        self.signature = signature
        self.key = _new(Key, (signature.process_set, signature.name, 0))
        self.arrays = list(arrays)
        self.handle, self.site = handle, site
        self.weight, self.absent, self.rows, self.splits = weight, absent, rows, splits
        self.residuals, self.mirrors = residuals, mirrors
        self.total: Optional[Total] = None
        self.urgent = False
        self.number = 0  # in the history
        self.submitted_s = 0.0
        self.began_s: Optional[float] = None
        self.ended_s: Optional[float] = None
        self.error = ""

    def begin(self) -> None:
        self.began_s = monotonic()

    def finish(self, result: object = None, error: Optional[BaseException] = None) -> None:
        """End the operation: wake the threads that wait for it, and record its end."""
        self.ended_s = monotonic()
        if error is not None:
            self.error = f"{type(error).__name__}: {error}"
        handle = self.handle
        handle.absent = self.absent
        # The history keeps this object, but arrays and result belong to the program: they go before a waiting
        # thread counts the references to its memory.
        self.arrays, self.residuals, self.mirrors = [], (), ()
        del self.handle
        handle.finish(result, error)


Work = Tuple[Signature, Optional[Request]]
"""A member of a bucket; without a request if this rank has joined, and contributes nothing."""


class Pending:
    """What this rank has submitted and not finished; used under the engine's lock."""

    def __init__(self) -> None:
        self.signatures: Dict[int, Signature] = {}  # by number
        self.unannounced: List[Request] = []
        self._numbers: Dict[Signature, int] = {}
        self.requests: Dict[Key, Request] = {}
        self._later: Dict[Key, Deque[Request]] = {}
        self._counts: Dict[int, int] = {}
        self._sites: Dict[str, int] = {}

    @property
    def announced(self) -> bool:
        """Whether rank 0 knows of an operation that has not ended."""
        return len(self.requests) > len(self.unannounced) or bool(self._later)

    def add(self, request: Request) -> None:
        """Add an operation. Of messages between two ranks with one name, each waits for the one before it."""
        signature, key = request.signature, request.key
        if not signature.name:
            count = self._counts.get(signature.process_set, 0) + 1
            self._counts[signature.process_set] = count
            key = request.key = signature.key(count)
        elif key in self.requests:
            if key.process_set < 0:
                self._later.setdefault(key, deque()).append(request)
                return
            raise DuplicateNameError(
                f"The operation {signature.name!r} at {request.site} has the same name as another one that "
                f"is currently being processed, submitted at {self.requests[key].site}. Wait for that one "
                "first, or give them different names."
            )
        self.requests[key] = request
        self.unannounced.append(request)

    def announce(self, urgent: bool, rank: int) -> Optional[Message]:
        """Return what rank 0 has not been told yet. ``rank`` is this one."""
        if not self.unannounced:
            return None
        operations: List[List[Any]] = []
        sites: List[str] = []
        for request in self.unannounced:
            signature = request.signature
            number = self._numbers.get(signature, 0)
            site = self._sites.get(request.site, 0)
            if not site and len(self._sites) < MAX_SITES:
                site = self._sites[request.site] = len(self._sites) + 1
                sites.append(request.site)
            operation = [number or signature.to_json(), request.key.number, site]
            more: Dict[str, Any] = {}
            if number and request.urgent and may_piggyback(request):
                more["values"] = pack(request, rank)
            if signature.weighted:
                more["weight"] = request.weight
            if request.absent:
                more["absent"] = format(request.absent, "x")
            operations.append([*operation, more] if more else operation)
        self.unannounced = []
        return {"type": "ready", "operations": operations, "sites": sites, "urgent": urgent}

    def learn(self, fresh: Sequence[Sequence[Any]]) -> None:
        """Rank 0 has given signatures numbers."""
        for number, data in fresh:
            signature = self.signatures[int(number)] = Signature.from_json(data)
            if number <= MAX_NUMBERS:
                self._numbers[signature] = number

    def forget(self, fresh: Sequence[Sequence[Any]]) -> None:
        """Responses have been executed: drop the numbers that were for these only."""
        for number, _ in fresh:
            if number > MAX_NUMBERS:
                del self.signatures[number]

    def take_bucket(self, run: Sequence[Sequence[Any]]) -> List[Work]:
        """Return a bucket's members, no longer pending; without a request if this rank has joined."""
        bucket: List[Work] = []
        for number, count, *more in run:
            signature = self.signatures[number]
            absent, total = int(more[0].get("absent", "0"), 16) if more else 0, None
            if signature.weighted:
                part, exponent = more[0]["total"]
                total = Total(float(part), int(exponent))
            request = self.take(Key(signature.process_set, signature.name, count))
            if request is not None:
                request.absent, request.total = absent, total
            bucket.append((signature, request))
        return bucket

    def take(self, key: Key) -> Optional[Request]:
        """Return an operation, no longer pending; None, but counted, if this rank has joined instead."""
        if key.number:
            self._counts[key.process_set] = max(self._counts.get(key.process_set, 0), key.number)
        request = self.requests.pop(key, None)
        if key in self._later:
            later = self._later[key]
            self.requests[key] = later.popleft()
            self.unannounced.append(self.requests[key])
            if not later:
                del self._later[key]
        return request

    def take_all(self) -> List[Request]:
        requests = self.waiting()
        self.requests.clear()
        self._later.clear()
        self.unannounced = []
        return requests

    def waiting(self) -> List[Request]:
        """Everything, in the order of submission; it stays. Messages that wait for others are the last."""
        return [*self.requests.values(), *chain(*self._later.values())]


PIGGYBACK_BYTES = 512
"""Maximum bytes of an operation. Rank 0 handles those of all ranks, so this is for losses and accuracies."""

_KINDS = (int(Collective.ALLREDUCE), int(Collective.BROADCAST), int(Collective.BARRIER))


def may_piggyback(request: Request) -> bool:
    """Return whether the numbers of an operation may travel with its announcement."""
    signature, arrays = request.signature, request.arrays
    if signature.kind not in _KINDS or signature.op == ReduceOp.ADASUM or signature.codec:
        return False
    # With a mirror the device has still to copy the numbers; a settled result does not say which parts all
    # ranks lack.
    if request.mirrors or request.absent:
        return False
    return len(arrays) <= 1 and sum(array.nbytes for array in arrays) <= PIGGYBACK_BYTES


def pack(request: Request, rank: int) -> str:
    """This rank's contribution as text. Of a broadcast only the root has one."""
    signature = request.signature
    if not request.arrays or (signature.kind == Collective.BROADCAST and signature.root != rank):
        return ""
    return b2a_base64(request.arrays[0].view(np.uint8).data, newline=False).decode("ascii")


def settle(
    signature: Signature, members: Sequence[int], packed: Mapping[int, str], weights: Mapping[int, float]
) -> str:
    """Return the operation's result, of what all members sent along, combined once in the order of ranks."""
    if not signature.dtypes:  # a barrier, or an operation of no arrays
        return ""
    if signature.kind == Collective.BROADCAST:
        return packed[signature.root]
    operands = [_numbers(signature, packed[rank], rank) for rank in members]
    if signature.weighted:
        total = Total.of(weights.values())
        operands = [weighable(operand) for operand in operands]
        for rank, operand in zip(members, operands):
            weigh(operand, total.share(weights[rank], len(members)))
    fold = kernel(
        ReduceOp(signature.op), operands[0].dtype, len(members), signature.prescale, signature.postscale
    )
    for operand in operands:
        fold.prepare(operand)
    out = operands[0]
    with np.errstate(all="ignore"):
        if len(operands) == 1:
            fold.finish_alone(out)
        elif out.size:
            fold.fold(out, operands, final=True)
        out = out.astype(dtype_named(signature.dtypes[0]), copy=False)
    return b2a_base64(out.view(np.uint8).data, newline=False).decode("ascii")


def unpack(request: Request, text: str) -> None:
    """Write the result over this rank's numbers."""
    if request.arrays:
        request.arrays[0][:] = _numbers(request.signature, text, 0)


def _numbers(signature: Signature, text: str, rank: int) -> Array:
    try:
        data = bytearray(a2b_base64(text))
    except ValueError:
        data = bytearray()
    if len(data) != signature.nbytes:
        raise ProtocolError(
            f"rank {rank} sent {len(data)} bytes along with {signature.describe(named=False)}, "
            f"which has {signature.nbytes}"
        )
    return np.frombuffer(data, dtype_named(signature.dtypes[0]))


class OperationHistory:
    """The last operations of one engine; ``on_failure`` is called with the error if it fails."""

    def __init__(self, capacity: int, moved_bytes: Callable[[int], int]) -> None:
        self._requests: Deque[Request] = deque(maxlen=capacity)
        self._moved_bytes = moved_bytes
        self._count = 0
        self.paused = ""
        self.on_failure: Optional[Callable[[BaseException], None]] = None

    def submitted(self, request: Request) -> None:
        """A request has been accepted. Called under the engine's lock."""
        self._count += 1
        request.number, request.submitted_s = self._count, monotonic()
        self._requests.append(request)

    def failed(self, error: BaseException) -> None:
        """The engine, or an operation that rank 0 has given up, has failed; callers still wait."""
        if self.on_failure is not None:
            self.on_failure(error)

    def rows(self) -> List[Row]:
        """All that is kept, oldest first. For any thread."""
        return [self._row(request) for request in list(self._requests)]

    def _row(self, request: Request) -> Row:
        signature = request.signature
        state = SUBMITTED if request.began_s is None else RUNNING
        if request.ended_s is not None:
            state = FAILED if request.error else DONE
        row = {
            "op": request.number, "kind": signature.verb, "name": signature.name,
            "what": signature.describe(named=False), "site": request.site, "state": state,
            "began": request.submitted_s, "ended": request.ended_s, "set": signature.process_set,
        }  # fmt: skip
        if not signature.name:
            row["count"] = request.key.number
        if state == RUNNING:
            row["moved"] = self._moved_bytes(signature.process_set)
        if request.error:
            row["error"] = request.error
        return row
