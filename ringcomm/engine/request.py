"""What is submitted to the engine, what the submitter holds meanwhile, and what the flight recorder keeps."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Callable, Deque, List, Optional, Sequence

import numpy as np

from ..arrays.kinds import BlockMirror
from ..clock import monotonic
from ..collective.observe import DONE, FAILED, RUNNING, SUBMITTED, Row
from ..collective.reduce import Total
from ..errors import fresh_copy
from ..ops import Collective
from ..wire.signature import Key, Signature


class Handle:
    """An operation on its way. ``done()`` asks, ``wait()`` waits and gives the result or raises.

    ``on_wait`` waits instead of :meth:`block`. ``convert`` makes the caller's result when it is first
    requested. ``absent`` has, at the end of a reduction, a bit for each part of it that no rank had.
    """

    __slots__ = ("_convert", "_finished", "_gate", "_on_wait", "_result", "absent", "error", "label")

    def __init__(
        self,
        label: str,
        on_wait: Optional[Callable[[Handle, Optional[float], bool], None]] = None,
        convert: Optional[Callable[[Any], Any]] = None,
    ) -> None:
        self.label = label
        self.absent = 0
        self.error: Optional[BaseException] = None  # with which it has failed
        self._convert = convert
        # A bare lock, held until the end: a tenth of what an Event costs to make.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._finished = False
        self._result: Any = None
        self._on_wait = on_wait

    def done(self) -> bool:
        """Return whether the operation has come to its end, good or bad."""
        return self._finished

    def wait(self, timeout_s: Optional[float] = None) -> Any:
        """Return the result, as soon as it is there; TimeoutError: it was not, and the operation goes on."""
        if not self._finished:
            self.wait_for_end(timeout_s)
        if self.error is not None:
            raise fresh_copy(self.error)
        if self._convert is not None:
            self._carry_out_conversion()
        return self._result

    def wait_for_end(self, timeout_s: Optional[float] = None) -> None:
        """Wait without taking the result or :attr:`error`; TimeoutError as :meth:`wait`."""
        if self._on_wait is None:
            self.block(timeout_s)
        elif not self._finished:
            self._on_wait(self, timeout_s, True)
        if not self._finished:
            raise TimeoutError(f"{self.label} did not finish within {timeout_s:g} s")

    def attend(self) -> None:
        """Wait for the end as :meth:`wait`, but of no interest to rank 0, and without result or error."""
        if self._on_wait is None:
            self.block(None)
        elif not self._finished:
            self._on_wait(self, None, False)

    def _carry_out_conversion(self) -> None:
        """Convert the result, once: in the thread that requests it, not in the engine's.

        Other threads that wait sleep until it is converted. Only a conversion that has succeeded is over,
        so that none of them gets what is not converted.
        """
        with self._gate:  # free since the operation has come to its end
            convert = self._convert
            if convert is not None:
                self._result = convert(self._result)
                self._convert = None

    def block(self, timeout_s: Optional[float]) -> bool:
        """Sleep until the end, or for so long; whether it has come."""
        if self._finished:
            return True
        if self._gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._gate.release()
        return self._finished

    def finish(self, result: Any = None, error: Optional[BaseException] = None) -> None:
        """The end, called once."""
        self._result, self.error = result, error
        self._finished = True
        self._gate.release()


class Request:
    """One operation of this rank.

    ``arrays`` are flat and contiguous; reductions and broadcasts overwrite them. ``rows`` are those of each
    array of an allgather, ``splits`` those for each member of an alltoall. ``weight`` is this rank's,
    ``total`` the sum of all ranks' once rank 0 has sent it. ``absent`` has a bit for each part of the
    contribution that this rank does not have and has filled with zeros, then those that no rank has.
    ``residuals`` are float32, of error feedback. ``mirrors`` are those of arrays on devices, of which
    ``arrays`` are the host blocks (None: in host memory). ``operation`` is what the flight recorder keeps.
    """

    __slots__ = (
        "absent", "arrays", "handle", "key", "mirrors", "operation", "residuals", "rows", "signature", "site",
        "splits", "total", "urgent", "weight",
    )  # fmt: skip

    def __init__(
        self,
        signature: Signature,
        arrays: Sequence[np.ndarray[Any, Any]],
        handle: Handle,
        site: str = "",
        weight: float = 1.0,
    ) -> None:
        self.weight = weight
        self.absent = 0
        self.total: Optional[Total] = None
        self.signature = signature
        self.key = Key(signature.process_set, signature.name, 0)
        self.arrays = list(arrays)
        self.handle = handle
        self.rows: Sequence[int] = ()
        self.splits: Sequence[int] = ()
        self.site = site
        self.urgent = False
        self.operation: Optional[RecordedOperation] = None
        self.residuals: Sequence[np.ndarray[Any, Any]] = ()
        self.mirrors: Sequence[Optional[BlockMirror]] = ()

    def begin(self) -> None:
        """Record that the operation is being run."""
        if self.operation is not None:
            self.operation.began_s = monotonic()

    def finish(self, result: object = None, error: Optional[BaseException] = None) -> None:
        """End the operation: wake the threads that wait for it, and record its end."""
        operation = self.operation
        if operation is not None:
            operation.ended_s = monotonic()
            operation.error = "" if error is None else f"{type(error).__name__}: {error}"
        self.mirrors = ()
        self.handle.absent = self.absent
        self.arrays = []  # before a waiting thread counts the references to its memory
        self.handle.finish(result, error)


class RecordedOperation:
    """What is remembered of a request. Not its arrays: they belong to the program again when it is done."""

    __slots__ = ("began_s", "ended_s", "error", "key", "number", "signature", "site", "submitted_s")

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.signature, self.key, self.site = request.signature, request.key, request.site
        self.submitted_s = monotonic()
        self.began_s: Optional[float] = None
        self.ended_s: Optional[float] = None
        self.error = ""


class OperationHistory:
    """The last operations of one engine; ``on_failure`` is called with the error if it fails."""

    def __init__(self, capacity: int, moved_bytes: Callable[[int], int]) -> None:
        self._operations: Deque[RecordedOperation] = deque(maxlen=capacity)
        self._moved_bytes = moved_bytes
        self._count = 0
        self.paused = ""
        self.on_failure: Optional[Callable[[BaseException], None]] = None

    def submitted(self, request: Request) -> None:
        """A request has been accepted. Called under the engine's lock."""
        self._count += 1
        request.operation = RecordedOperation(self._count, request)
        self._operations.append(request.operation)

    def failed(self, error: BaseException) -> None:
        """The engine, or an operation that rank 0 has given up, has failed; callers still wait."""
        if self.on_failure is not None:
            self.on_failure(error)

    def rows(self) -> List[Row]:
        """All that is kept, oldest first. For any thread."""
        return [self._row(operation) for operation in list(self._operations)]

    def _row(self, operation: RecordedOperation) -> Row:
        signature = operation.signature
        state = SUBMITTED if operation.began_s is None else RUNNING
        if operation.ended_s is not None:
            state = FAILED if operation.error else DONE
        row = {
            "op": operation.number, "kind": Collective(signature.kind).name.lower(), "name": signature.name,
            "what": signature.describe(named=False), "site": operation.site, "state": state,
            "began": operation.submitted_s, "ended": operation.ended_s, "set": signature.process_set,
        }  # fmt: skip
        if not signature.name:
            row["count"] = operation.key.number
        if state == RUNNING:
            row["moved"] = self._moved_bytes(signature.process_set)
        if operation.error:
            row["error"] = operation.error
        return row
