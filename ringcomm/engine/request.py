"""What is submitted to the engine, and what the submitter holds in the meantime."""

from __future__ import annotations

import threading
from functools import lru_cache
from math import prod
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..collective.staged import Mirror
from ..collective.weighted import Total
from ..errors import fresh_copy
from ..ops import CODECS, Collective, ReduceOp, factor_of
from ..wire.frames import NO_OP, NO_ROOT

Shape = Tuple[int, ...]

BY_ROWS = (Collective.ALLGATHER, Collective.ALLTOALL)
"""Their first dimension may differ from rank to rank."""


MAX_SITES = 4096
"""For how many lines of the program rank 0 is told where they are, so that a number stands for each."""


class Signature(NamedTuple):
    """All that ranks must agree on about an operation. Equal signatures are run alike.

    Attributes:
        name: as the user named it; empty for operations that are matched by their order.
        process_set: number of the process set.
        kind: a :class:`~ringcomm.ops.Collective`.
        op: a :class:`~ringcomm.ops.ReduceOp`, or ``NO_OP``.
        root: rank in the job, or ``NO_ROOT``.
        dtypes, shapes: of every tensor; for collectives by rows the shape of a row.
        prescale, postscale: factors before and after a reduction.
        codec: place in :data:`ringcomm.ops.CODECS`, for reductions.
        weighted: whether every rank gives its contribution a weight; the weights themselves may differ.
    """

    name: str
    process_set: int
    kind: int
    op: int
    root: int
    dtypes: Tuple[str, ...]
    shapes: Tuple[Shape, ...]
    prescale: float = 1.0
    postscale: float = 1.0
    codec: int = 0
    weighted: bool = False

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Signature:
        """The signature of which ``list(signature)`` has travelled as JSON.

        Raises:
            ValueError, TypeError, OverflowError: nothing that could be run.
        """
        name, process_set, kind, op, root, dtypes, shapes, prescale, postscale, codec, weighted = data
        found = cls(
            str(name), int(process_set), int(kind), int(op), int(root), tuple(map(str, dtypes)),
            tuple(tuple(map(int, shape)) for shape in shapes), factor_of(float(prescale)),
            factor_of(float(postscale)), int(codec), bool(weighted),
        )  # fmt: skip
        Collective(found.kind)
        if not 0 <= found.codec < len(CODECS):
            raise ValueError("no such codec")
        for dtype in found.dtypes:
            _itemsize(dtype)
        if len(found.dtypes) != len(found.shapes) or any(n < 0 for shape in found.shapes for n in shape):
            raise ValueError("tensors without a type or of negative length")
        return found

    def key(self, number: int = 0) -> Key:
        """By what the operation is matched, of which ``number`` counts those without a name."""
        return Key(self.process_set, self.name, number)

    @property
    def nbytes(self) -> int:
        """Payload of all tensors together in bytes (by rows: of one row)."""
        return sum(_itemsize(dtype) * prod(shape) for dtype, shape in zip(self.dtypes, self.shapes))

    def describe(self) -> str:
        """The call as a person would write it."""
        kind = Collective(self.kind)
        message = self.process_set < 0  # between two ranks, which its name says
        verb = "message" if message else kind.name.lower()
        arguments: List[str] = []
        if len(self.shapes) > 1:
            verb = f"grouped_{verb}"
            arguments.append(f"{len(self.shapes)} tensors")
            arguments.append("types " + "/".join(sorted(set(self.dtypes))))
        elif self.shapes and kind not in (Collective.BARRIER, Collective.JOIN):
            rows = "rows of " if kind in BY_ROWS else ""
            arguments += [f"{rows}shape {self.shapes[0]}", self.dtypes[0]]
        if self.op != NO_OP:
            arguments.append(f"op={ReduceOp(self.op).name.capitalize()}")
        if self.root != NO_ROOT and not message:
            arguments.append(f"root_rank={self.root}")
        if self.prescale != 1.0:
            arguments.append(f"prescale_factor={self.prescale!r}")
        if self.postscale != 1.0:
            arguments.append(f"postscale_factor={self.postscale!r}")
        if self.codec:
            arguments.append(f"compression={CODECS[self.codec]!r}")
        if self.weighted:
            arguments.append("with a weight")
        if self.process_set and not message:
            arguments.append(f"process set {self.process_set}")
        return f"{verb}({', '.join(arguments)})"


@lru_cache(maxsize=None)
def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


class Key(NamedTuple):
    """By what the same operation on several ranks is recognised.

    Attributes:
        number: counts the operations without a name of a process set, from 1; 0 for those with one.
    """

    process_set: int
    name: str
    number: int

    def __str__(self) -> str:
        return repr(self.name) if self.name else f"without a name (number {self.number})"


class Handle:
    """An operation on its way. ``done()`` asks, ``wait()`` waits and gives the result or raises.

    Args:
        label: what it is, for messages.
        on_wait: sleeps until it is done, instead of :meth:`block`.
        convert: makes the caller's result from the engine's, when it is first requested.

    Attributes:
        absent: at the end of a reduction, the parts of it that no rank had: a bit for each.
    """

    __slots__ = (
        "_callbacks", "_convert", "_error", "_finished", "_gate", "_on_wait", "_result", "absent", "label",
    )  # fmt: skip

    def __init__(
        self,
        label: str,
        on_wait: Optional[Callable[[Handle, Optional[float]], None]] = None,
        convert: Optional[Callable[[Any], Any]] = None,
    ) -> None:
        self.label = label
        self.absent = 0
        self._convert = convert
        # A bare lock, held until the end: a tenth of what an Event costs to make.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._finished = False
        self._result: Any = None
        self._error: Optional[BaseException] = None
        self._callbacks: Optional[List[Callable[[Handle], None]]] = None
        self._on_wait = on_wait

    def done(self) -> bool:
        """Return whether the operation has come to its end, good or bad."""
        return self._finished

    def wait(self, timeout_s: Optional[float] = None) -> Any:
        """The result, as soon as it is there.

        Raises:
            TimeoutError: it was not there in time. The operation goes on.
            RingcommError: the operation failed.
        """
        if not self._finished:
            if self._on_wait is not None:
                self._on_wait(self, timeout_s)
            else:
                self.block(timeout_s)
            if not self._finished:
                raise TimeoutError(f"{self.label} was not done within {timeout_s:g} s")
        if self._error is not None:
            raise fresh_copy(self._error)
        if self._convert is not None:
            self._carry_out_conversion()
        return self._result

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
        self._result = result
        self._error = error
        self._finished = True
        self._gate.release()
        for callback in self._callbacks or ():
            callback(self)

    def when_done(self, callback: Callable[[Handle], None]) -> None:
        """Call back at the end, in the engine's thread (at once if it is over). Before submission only."""
        if self._finished:
            callback(self)
        else:
            self._callbacks = [*(self._callbacks or ()), callback]

    @property
    def error(self) -> Optional[BaseException]:
        """What it failed with, if it did."""
        return self._error


class Request:
    """One operation of this rank.

    Attributes:
        signature, key: what it is, and by what it is matched.
        arrays: flat, contiguous; of reductions and broadcasts they are overwritten with the result. None when
            it is done.
        rows: for allgather, how many rows each array has.
        splits: for alltoall, how many rows go to each member of the process set.
        weight: of this rank's contribution, if the signature has weights.
        total: sum of all ranks' weights, once rank 0 has sent it.
        absent: the parts of this rank's contribution that it does not have, and has filled with zeros: a bit
            for each, from the lowest. Then, once rank 0 has responded, those that no rank has.
        urgent: whether a caller waits for it from the start.
        site: file and line of the call.
        operation: what the flight recorder remembers of it, if there is one.
        residuals: of error feedback, float32, one for each array; empty without it.
        mirrors: of arrays on devices, which are loaded when they are submitted, one for each array (None: in
            host memory); empty if there is none. Then ``arrays`` are their host blocks.
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
        absent: int = 0,
    ) -> None:
        self.weight = weight
        self.absent = absent
        self.total = Total(1.0, 0)
        self.signature = signature
        self.key = signature.key()
        self.arrays = list(arrays)
        self.handle = handle
        self.rows: Sequence[int] = ()
        self.splits: Sequence[int] = ()
        self.site = site
        self.urgent = False
        self.operation: Any = None
        self.residuals: Sequence[np.ndarray[Any, Any]] = ()
        self.mirrors: Sequence[Optional[Mirror]] = ()
