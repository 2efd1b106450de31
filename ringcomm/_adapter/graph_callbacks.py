"""Collectives on NumPy arrays, for callbacks from the graphs of frameworks.

**Deadlock avoidance.** A framework may execute independent nodes of a graph in any order, on few threads. Two
callbacks that each block for another rank can occupy the only threads of two ranks for ever, if each waits
for an operation that the other rank has not submitted. This module prevents it as follows:

1. A :class:`Batch` submits *all* of its operations before it waits for any. A step's gradients are one batch.
2. Operations are matched by name, so each rank may submit them in another order.
3. :meth:`Batch.start` only submits and never waits for another rank; :meth:`Batch.finish` waits. Where a
   graph has several batches without an order between them, an adapter makes two callbacks of each, and
   must ensure that waiting callbacks do not occupy the threads that submitting callbacks need.
"""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from .. import api
from ..arrays.bridge import flat_copy, flat_view
from ..arrays.operands import HostOperand, Operand
from ..calls.process_set import number_of
from ..dtypes import Array
from ..engine.request import Handle
from ..errors import RingcommError
from .causes import record_cause
from .compressed import CompressionState, Pending, start_coded
from .reduction import Reduction
from .submit import (
    finish_earlier,
    run_all,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
    wire_name,
)

AnyHandle = Union[Handle, Pending]


class Operation(NamedTuple):
    """One collective."""

    kind: str  # alltoall has a second input: rows by rank, or empty for equal numbers
    how: Reduction = Reduction()  # of other collectives than reductions: the ranks that take part
    name: Optional[str] = None  # by which ranks match it; None: by its order
    inputs: int = 1  # number of arrays
    root_rank: int = 0
    has_weight: bool = False  # the last input of a reduction is the weight of the others
    state: Optional[CompressionState] = None  # kept from step to step by an allreduce with codes
    parts: Sequence[Tuple[int, ...]] = ()  # of an allreduce: shapes of arrays side by side in its input

    @property
    def is_coded(self) -> bool:
        """Return whether the reduction executes a compression."""
        return getattr(self.how.compression, "kind", "none") != "none"

    @property
    def keeps_shapes(self) -> bool:
        """Return whether results have the shapes of the arrays, so that they can overwrite them."""
        return self.kind in ("allreduce", "broadcast")

    def start(self, arrays: Sequence[Array], urgent: bool = False, in_place: bool = False) -> AnyHandle:
        """Submit it; the handle returns a list of arrays, or None for a barrier.

        Of an alltoall the list has the received rows and their number by source rank (int32). ``urgent``: the
        caller waits for it next. ``in_place`` overwrites the arrays, which are contiguous, if it
        :attr:`keeps_shapes`. ConfigError: row counts do not fit. ShapeError: an array has no rows to divide.
        """
        return _STARTS[self.kind](self, arrays, urgent, in_place)


def _allreduce(operation: Operation, arrays: Sequence[Array], urgent: bool, in_place: bool) -> AnyHandle:
    how, weight = operation.how, operation.how.weight_now()
    if operation.has_weight:
        arrays, weight = arrays[:-1], float(arrays[-1])
    if operation.is_coded:
        return start_coded(how, operation.name, arrays, urgent, weight, operation.state, in_place)
    if operation.state is not None:
        finish_earlier("allreduce", operation.name, how.process_set)
    operands = _operands(arrays, in_place)
    if operation.parts:
        (whole,) = operands
        flat, ends = whole.flat, list(itertools.accumulate(map(math.prod, operation.parts)))
        operands = [
            HostOperand(flat[start:stop], shape)
            for start, stop, shape in zip([0, *ends], ends, operation.parts)
        ]
        return start_allreduce(operands, how.call(operation.name, weight), urgent, True, lambda _: [flat])
    return start_allreduce(operands, how.call(operation.name, weight), urgent, True)


def _reducescatter(operation: Operation, arrays: Sequence[Array], urgent: bool, _: bool) -> AnyHandle:
    weight = None
    if operation.has_weight:
        arrays, weight = arrays[:-1], float(arrays[-1])
    options = operation.how.call(operation.name, weight, operation.how.compression)
    return start_reducescatter(_operands(arrays), options, urgent, True)


def _allgather(operation: Operation, arrays: Sequence[Array], urgent: bool, _: bool) -> AnyHandle:
    operands = [HostOperand(*flat_copy(array)) for array in arrays]
    return start_allgather(operands, operation.name, operation.how.process_set, urgent, True)


def _broadcast(operation: Operation, arrays: Sequence[Array], urgent: bool, in_place: bool) -> AnyHandle:
    return start_broadcast(
        _operands(arrays, in_place), operation.root_rank, operation.name, operation.how.process_set, urgent,
        True,
    )  # fmt: skip


def _alltoall(operation: Operation, arrays: Sequence[Array], urgent: bool, _: bool) -> AnyHandle:
    splits = np.asarray(arrays[1])
    return start_alltoall(
        HostOperand(*flat_copy(arrays[0])), splits.tolist() if splits.size else None, operation.name,
        operation.how.process_set, urgent, lambda numbers: np.asarray(numbers, np.int32),
    )  # fmt: skip


def _barrier(operation: Operation, _: Sequence[Array], urgent: bool, in_place: bool) -> AnyHandle:
    engine = api.context().engine
    return engine.barrier(wire_name("barrier", operation.name), number_of(operation.how.process_set), urgent)


_STARTS: Dict[str, Callable[[Operation, Sequence[Array], bool, bool], AnyHandle]] = {
    "allreduce": _allreduce, "reducescatter": _reducescatter, "allgather": _allgather,
    "broadcast": _broadcast, "alltoall": _alltoall, "barrier": _barrier,
}  # fmt: skip


def check_sets(operations: Sequence[Operation]) -> None:
    """Raise UnknownProcessSetError if an operation's set is not registered, before the graph is built."""
    for operation in operations:
        api.context().engine.sets.members(number_of(operation.how.process_set))


class Batch:
    """Operations that a rank submits together; each takes its ``inputs`` of the arrays, in order.

    ``before`` is called before each time.
    """

    def __init__(self, operations: Sequence[Operation], before: Callable[[], None] = lambda: None) -> None:
        self.operations = list(operations)
        self._before = before
        weights = [item.how.weight for item in self.operations if item.how.weight is not None]
        self._weight = weights[0] if weights else None
        self._started: Dict[int, List[AnyHandle]] = {}
        self._latest: List[AnyHandle] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def run(self, arrays: Sequence[Any]) -> List[Array]:
        """Submit all operations, then wait for all; return their results in order.

        RingcommError: an operation failed; it is raised after all operations have ended.
        """
        return self._wait(self._submit(arrays, urgent=True))

    def overwrite(self, arrays: Iterable[Array]) -> None:
        """Run the operations so that the arrays, writable and contiguous, receive the results.

        Results must have the shapes of the inputs, which are read one operation after the other.
        """
        self._wait(self._submit(arrays, urgent=True, in_place=True))

    def start(self, arrays: Sequence[Any]) -> int:
        """Submit all operations and return a number for :meth:`finish`. Does not wait for other ranks."""
        handles = self._submit(arrays, urgent=False)
        with self._lock:
            number = next(self._numbers)
            self._started[number] = handles
        return number

    def finish(self, number: int) -> List[Array]:
        """Wait for the operations of a :meth:`start`; return their results in order."""
        with self._lock:
            handles = self._started.pop(int(number))
        for handle in handles:
            # Not wait(): it reports a deadlock when all Python threads wait, but the framework's own threads
            # may be computing the input of the next operation.
            handle.attend()
        return self._wait(handles)

    def _submit(self, arrays: Iterable[Any], urgent: bool, in_place: bool = False) -> List[AnyHandle]:
        # A framework may run this batch again before its last run has ended, and a name can be in use only
        # once. The last run was submitted, so it ends.
        for handle in self._latest:
            handle.attend()
        # Set now: if the start of one fails, those before it go on.
        handles = self._latest = []
        last, left = self.operations[-1], iter(arrays)
        try:
            self._before()
            for operation in self.operations:
                given = [np.asarray(array) for array in itertools.islice(left, operation.inputs)]
                handles.append(operation.start(given, urgent and operation is last, in_place))
        except RingcommError as error:
            record_cause(error)
            raise
        return handles

    def _wait(self, handles: Sequence[AnyHandle]) -> List[Array]:
        try:
            results = run_all([handle.wait for handle in handles])
        except RingcommError as error:
            record_cause(error)
            raise
        if self._weight is not None:
            self._weight.reduced()
        return [array for arrays in results for array in arrays or ()]


def _operands(arrays: Sequence[Array], in_place: bool = False) -> List[Operand]:
    """Return contiguous arrays to overwrite, or copies of any arrays, contiguous in memory per dtype.

    The engine reduces contiguous arrays as one without packing them. The arrays that a graph passes to a
    callback belong to the framework, so they must be copied in any case.
    """
    if in_place:
        return [HostOperand(array.reshape(-1), array.shape) for array in arrays]
    if len(arrays) == 1:
        return [HostOperand(*flat_copy(arrays[0]))]
    pairs = [flat_view(array) for array in arrays]
    buffers = {
        dtype: np.empty(sum(flat.size for flat, _ in pairs if flat.dtype == dtype), dtype)
        for dtype in {flat.dtype for flat, _ in pairs}
    }
    filled = dict.fromkeys(buffers, 0)
    operands: List[Operand] = []
    for flat, shape in pairs:
        start = filled[flat.dtype]
        filled[flat.dtype] = stop = start + flat.size
        target = buffers[flat.dtype][start:stop]
        target[:] = flat
        operands.append(HostOperand(target, shape))
    return operands
