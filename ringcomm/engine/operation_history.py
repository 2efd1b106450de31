"""The flight recorder's part in the engine: the last operations by name, from submission to end."""

from __future__ import annotations

from collections import deque
from typing import Callable, Deque, List, Optional

from ..clock import monotonic
from ..collective.call_history import DONE, FAILED, RUNNING, SUBMITTED, Row
from ..ops import Collective
from ..wire.signature import Key, Signature
from .request import Request


class RecordedOperation:
    """What is remembered of a request. Not its arrays: they belong to the program again when it is done."""

    __slots__ = ("began_s", "ended_s", "error", "key", "number", "signature", "site", "submitted_s")

    def __init__(self, number: int, signature: Signature, key: Key, site: str) -> None:
        self.number = number
        self.signature = signature
        self.key = key
        self.site = site
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
        request.operation = RecordedOperation(self._count, request.signature, request.key, request.site)
        self._operations.append(request.operation)

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
            "began": operation.submitted_s, "ended": operation.ended_s,
            "set": signature.process_set,
        }  # fmt: skip
        if not signature.name:
            row["count"] = operation.key.number
        if state == RUNNING:
            row["moved"] = self._moved_bytes(signature.process_set)
        if operation.error:
            row["error"] = operation.error
        return row


def began(request: Optional[Request]) -> None:
    """A request is being run."""
    if request is not None and request.operation is not None:
        request.operation.began_s = monotonic()


def finish(request: Request, result: object = None, error: Optional[BaseException] = None) -> None:
    """End a request: wake the threads that wait for it, and record its end."""
    operation = request.operation
    if operation is not None:
        operation.ended_s = monotonic()
        operation.error = "" if error is None else f"{type(error).__name__}: {error}"
    request.mirrors = ()
    request.handle.absent = request.absent
    request.arrays = []  # before a waiting thread counts the references to its memory
    request.handle.finish(result, error)
