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
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from .. import api
from ..arrays.bridge import flat_copy, flat_view
from ..dtypes import Array
from ..engine.request import Handle, Shape
from ..errors import RingcommError
from ..ops import ReduceOp
from ..process_set import ProcessSet, number_of
from .arguments import wire_name
from .causes import record_cause
from .compressed import CompressedAllreduce, CompressedReducescatter, Pending
from .gradients import Reduction
from .waiting import run_all


class Allreduce(NamedTuple):
    """Reduces ``inputs`` arrays in one operation.

    Attributes:
        has_weight: whether the last input is the weight of the others.
    """

    how: Reduction
    name: Optional[str] = None
    inputs: int = 1
    has_weight: bool = False

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle returns new arrays."""
        weight = self.how.weight_now()
        if self.has_weight:
            arrays, weight = arrays[:-1], float(arrays[-1])
        return self._submit(*_side_by_side(arrays), urgent, weight)

    def overwrite(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the arrays, which are contiguous, receive the results, and the handle returns them."""
        return self._submit(*_flat(arrays), urgent, self.how.weight_now())

    def _submit(
        self, flats: List[Array], shapes: List[Shape], urgent: bool, weight: Optional[float]
    ) -> Handle:
        return api.context().engine.allreduce(
            flats, self.how.op, wire_name("allreduce", self.name), shapes, self.how.prescale,
            self.how.postscale, number_of(self.how.process_set), urgent,
            lambda _: [flat.reshape(shape) for flat, shape in zip(flats, shapes)], weight=weight,
        )  # fmt: skip


class Reducescatter(NamedTuple):
    """Reduces arrays; every rank gets its part of the rows."""

    how: Reduction
    name: Optional[str] = None
    inputs: int = 1

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle returns new arrays."""
        flats, shapes = _side_by_side(arrays)
        return api.context().engine.reducescatter(
            flats, shapes, self.how.op, wire_name("reducescatter", self.name), self.how.prescale,
            self.how.postscale, number_of(self.how.process_set), urgent, list,
        )  # fmt: skip


class Allgather(NamedTuple):
    """Concatenates the rows of all ranks, for each array."""

    process_set: ProcessSet
    name: Optional[str] = None
    inputs: int = 1

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle returns new arrays."""
        pairs = [flat_copy(array) for array in arrays]
        return api.context().engine.allgather(
            [flat for flat, _ in pairs], [shape for _, shape in pairs], wire_name("allgather", self.name),
            number_of(self.process_set), urgent, list,
        )  # fmt: skip


class Broadcast(NamedTuple):
    """Sends the root's arrays to all ranks."""

    root_rank: int
    process_set: ProcessSet
    name: Optional[str] = None
    inputs: int = 1

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle returns new arrays."""
        return self._submit(*_side_by_side(arrays), urgent)

    def overwrite(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the arrays, which are contiguous, receive the results, and the handle returns them."""
        return self._submit(*_flat(arrays), urgent)

    def _submit(self, flats: List[Array], shapes: List[Shape], urgent: bool) -> Handle:
        return api.context().engine.broadcast(
            flats, self.root_rank, wire_name("broadcast", self.name), shapes, number_of(self.process_set),
            urgent, lambda _: [flat.reshape(shape) for flat, shape in zip(flats, shapes)],
        )  # fmt: skip


class Alltoall(NamedTuple):
    """Sends rows to every rank. The second input is their number by rank; empty: the same number for each."""

    process_set: ProcessSet
    name: Optional[str] = None
    inputs: int = 2

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle returns the received rows and their number by source rank (int32)."""
        flat, shape = flat_copy(arrays[0])
        splits = np.asarray(arrays[1])
        return api.context().engine.alltoall(
            flat, shape, splits.tolist() if splits.size else None, wire_name("alltoall", self.name),
            number_of(self.process_set), urgent, lambda result: [result[0], np.asarray(result[1], np.int32)],
        )  # fmt: skip


class Barrier(NamedTuple):
    """Completes once all ranks have submitted it."""

    process_set: ProcessSet
    name: Optional[str] = None
    inputs: int = 0

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle returns None."""
        engine = api.context().engine
        return engine.barrier(wire_name("barrier", self.name), number_of(self.process_set), urgent)


Overwriting = (Allreduce, Broadcast)
"""Operations that can overwrite their arrays instead of returning new ones."""

REDUCTIONS = (Allreduce, CompressedAllreduce, Reducescatter, CompressedReducescatter)
"""Operations with a :class:`~.gradients.Reduction`."""

Operation = Union[
    Allreduce, CompressedAllreduce, Reducescatter, CompressedReducescatter, Allgather, Broadcast, Alltoall,
    Barrier,
]  # fmt: skip

AnyHandle = Union[Handle, Pending]


def check_sets(operations: Sequence[Operation]) -> None:
    """Check that the process sets of operations exist, before the operations are added to a graph.

    Raises:
        UnknownProcessSetError: a process set is not registered.
    """
    for operation in operations:
        if isinstance(operation, REDUCTIONS):
            chosen = operation.how.process_set
        else:
            chosen = operation.process_set
        api.context().engine.sets.members(number_of(chosen))


class Batch:
    """Operations that a rank submits together.

    Args:
        operations: each takes its ``inputs`` of the arrays, in order.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = list(operations)
        weights = [item.how.weight for item in self.operations if isinstance(item, Allreduce)]
        self._weight = next((weight for weight in weights if weight is not None), None)
        self._started: Dict[int, List[AnyHandle]] = {}
        self._latest: List[AnyHandle] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def run(self, arrays: Sequence[Any]) -> List[Array]:
        """Submit all operations, then wait for all; returns their results in order.

        Raises:
            RingcommError: an operation failed; it is raised after all operations have ended.
        """
        return self._wait(self._submit(arrays, urgent=True))

    def overwrite(self, arrays: Sequence[Array]) -> None:
        """As :meth:`run`, but the arrays themselves receive the results.

        Args:
            arrays: writable and contiguous, for operations that are all :data:`Overwriting`.
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
        """Wait for the operations of a :meth:`start`; returns their results in order."""
        with self._lock:
            handles = self._started.pop(int(number))
        for handle in handles:
            # Not wait(): it reports a deadlock when all Python threads wait, but the framework's own threads
            # may be computing the input of the next operation.
            handle.block(None)
        return self._wait(handles)

    def _submit(self, arrays: Sequence[Any], urgent: bool, in_place: bool = False) -> List[AnyHandle]:
        # A framework may run this batch again before its last run has ended, and a name can be in use only
        # once. The last run was submitted, so it ends.
        for handle in self._latest:
            handle.block(None)
        handles: List[AnyHandle] = []
        start = 0
        last = self.operations[-1]
        try:
            for operation in self.operations:
                stop = start + operation.inputs
                given = [np.asarray(array) for array in arrays[start:stop]]
                now = urgent and operation is last
                if in_place and isinstance(operation, Overwriting):
                    handles.append(operation.overwrite(given, now))
                else:
                    handles.append(operation.start(given, now))
                start = stop
        except RingcommError as error:
            record_cause(error)
            raise
        self._latest = handles
        if self._weight is not None:
            self._weight.submitted()
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


def _side_by_side(arrays: Sequence[Array]) -> Tuple[List[Array], List[Shape]]:
    """Flat copies of arrays, contiguous in memory per dtype, and the shapes.

    The engine reduces contiguous arrays as one without packing them. The arrays that a graph passes to a
    callback belong to the framework, so they must be copied in any case.
    """
    if len(arrays) == 1:
        flat, shape = flat_copy(arrays[0])
        return [flat], [shape]
    pairs = [flat_view(array) for array in arrays]
    buffers = {
        dtype: np.empty(sum(flat.size for flat, _ in pairs if flat.dtype == dtype), dtype)
        for dtype in {flat.dtype for flat, _ in pairs}
    }
    filled = dict.fromkeys(buffers, 0)
    flats = []
    for flat, _ in pairs:
        start = filled[flat.dtype]
        filled[flat.dtype] = stop = start + flat.size
        target = buffers[flat.dtype][start:stop]
        target[:] = flat
        flats.append(target)
    return flats, [shape for _, shape in pairs]


def _flat(arrays: Sequence[Array]) -> Tuple[List[Array], List[Shape]]:
    """The memory of contiguous arrays as flat ones, and the shapes."""
    return [array.reshape(-1) for array in arrays], [array.shape for array in arrays]


def average(process_set: ProcessSet, op: ReduceOp = ReduceOp.AVERAGE) -> Reduction:
    """A reduction without factors, by default an average."""
    return Reduction(op, 1.0, 1.0, process_set)
