"""Collectives on NumPy arrays, as frameworks call them back from their graphs.

**No deadlock by order.** A framework that runs a graph may run what is independent in any order, on as
few threads as it likes: two callbacks that each wait for another rank can hold the only threads of two
ranks for ever, each waiting for what the other has not come to yet. Three things prevent that here:

1. A :class:`Batch` submits *all* of its operations before it waits for any. A step's gradients are one.
2. Operations are matched by name, so submitting them in another order than other ranks does no harm.
3. :meth:`Batch.start` only submits, and never waits for another rank; :meth:`Batch.finish` waits. Where a
   graph has several batches without an order between them, an adapter makes two callbacks of each, and
   must see to it that those that wait do not take the threads that those that start need.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from .. import api
from ..arrays.bridge import flat_copy, flat_view
from ..dtypes import Array
from ..engine.request import Handle
from ..errors import RingcommError
from ..ops import ReduceOp
from ..process_set import ProcessSet, number_of
from .arguments import row_counts, wire_name
from .causes import record_cause
from .gradients import Reduction


class Allreduce(NamedTuple):
    """Reduces so many arrays together, all of them or none."""

    how: Reduction
    name: Optional[str] = None
    inputs: int = 1

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle gives new arrays."""
        flats, shapes = _side_by_side(arrays)
        return api.context().engine.allreduce(
            flats, self.how.op, wire_name("allreduce", self.name), shapes, self.how.prescale,
            self.how.postscale, number_of(self.how.process_set), urgent,
            lambda _: [flat.reshape(shape) for flat, shape in zip(flats, shapes)],
        )  # fmt: skip


class Reducescatter(NamedTuple):
    """Reduces arrays, of which every rank gets its rows."""

    how: Reduction
    name: Optional[str] = None
    inputs: int = 1

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle gives new arrays."""
        flats, shapes = _side_by_side(arrays)
        return api.context().engine.reducescatter(
            flats, shapes, self.how.op, wire_name("reducescatter", self.name), self.how.prescale,
            self.how.postscale, number_of(self.how.process_set), urgent, list,
        )  # fmt: skip


class Allgather(NamedTuple):
    """Collects everybody's rows of each array."""

    process_set: ProcessSet
    name: Optional[str] = None
    inputs: int = 1

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle gives new arrays."""
        pairs = [flat_copy(array) for array in arrays]
        return api.context().engine.allgather(
            [flat for flat, _ in pairs], [shape for _, shape in pairs], wire_name("allgather", self.name),
            number_of(self.process_set), urgent, list,
        )  # fmt: skip


class Broadcast(NamedTuple):
    """Gives all ranks the root's arrays."""

    root_rank: int
    process_set: ProcessSet
    name: Optional[str] = None
    inputs: int = 1

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle gives new arrays."""
        flats, shapes = _side_by_side(arrays)
        return api.context().engine.broadcast(
            flats, self.root_rank, wire_name("broadcast", self.name), shapes, number_of(self.process_set),
            urgent, lambda _: [flat.reshape(shape) for flat, shape in zip(flats, shapes)],
        )  # fmt: skip


class Alltoall(NamedTuple):
    """Sends rows to everybody. The second input says how many to each; empty for equally many."""

    process_set: ProcessSet
    name: Optional[str] = None
    inputs: int = 2

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle gives the received rows, and how many came from whom (int32)."""
        flat, shape = flat_copy(arrays[0])
        splits = np.asarray(arrays[1])
        engine = api.context().engine
        number = number_of(self.process_set)
        members = len(engine.sets.check_member(number))
        rows = shape[0] if shape else 0
        counts = row_counts(rows, splits.tolist() if splits.size else None, members)
        return engine.alltoall(
            flat, shape, counts, wire_name("alltoall", self.name), number, urgent,
            lambda result: [result[0], np.asarray(result[1], np.int32)],
        )  # fmt: skip


class Barrier(NamedTuple):
    """Done once all ranks have come to it."""

    process_set: ProcessSet
    name: Optional[str] = None
    inputs: int = 0

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Handle:
        """Submit it; the handle gives nothing."""
        engine = api.context().engine
        return engine.barrier(wire_name("barrier", self.name), number_of(self.process_set), urgent)


Operation = Union[Allreduce, Reducescatter, Allgather, Broadcast, Alltoall, Barrier]


def check_sets(operations: Sequence[Operation]) -> None:
    """See that there are the process sets that operations name, before a graph has them in it.

    Raises:
        UnknownProcessSetError: one of them is not registered.
    """
    for operation in operations:
        if isinstance(operation, (Allreduce, Reducescatter)):
            chosen = operation.how.process_set
        else:
            chosen = operation.process_set
        api.context().engine.sets.members(number_of(chosen))


class Batch:
    """Operations that a rank submits all at once.

    Args:
        operations: each takes its number of inputs.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = list(operations)
        self._started: Dict[int, List[Handle]] = {}
        self._latest: List[Handle] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def run(self, arrays: Sequence[Any]) -> List[Array]:
        """Submit all operations, then wait for all; their results one after another.

        Raises:
            RingcommError: something failed; what could be finished is finished.
        """
        return self._wait(self._submit(arrays, urgent=True))

    def start(self, arrays: Sequence[Any]) -> int:
        """Submit all operations; a number for :meth:`finish`. Waits for no other rank's next step."""
        handles = self._submit(arrays, urgent=False)
        with self._lock:
            number = next(self._numbers)
            self._started[number] = handles
        return number

    def finish(self, number: int) -> List[Array]:
        """Wait for what :meth:`start` has submitted; the results one after another."""
        with self._lock:
            handles = self._started.pop(int(number))
        for handle in handles:
            # Not wait(): that may conclude from all threads waiting that nothing more will be started.
            # Here the framework's own threads may be computing what comes next.
            handle.block(None)
        return self._wait(handles)

    def _submit(self, arrays: Sequence[Any], urgent: bool) -> List[Handle]:
        # The same part of a graph may come round again before its last round is over, and a name can
        # be in use only once. The last round was submitted, so it ends.
        for handle in self._latest:
            handle.block(None)
        handles: List[Handle] = []
        start = 0
        last = self.operations[-1]
        try:
            for operation in self.operations:
                stop = start + operation.inputs
                given = [np.asarray(array) for array in arrays[start:stop]]
                handles.append(operation.start(given, urgent and operation is last))
                start = stop
        except RingcommError as error:
            record_cause(error)
            raise
        self._latest = handles
        return handles

    def _wait(self, handles: Sequence[Handle]) -> List[Array]:
        results: List[Array] = []
        problem: Optional[RingcommError] = None
        for handle in handles:
            try:
                results.extend(handle.wait() or ())
            except RingcommError as error:
                problem = problem or error
        if problem is not None:
            record_cause(problem)
            raise problem
        return results


def _side_by_side(arrays: Sequence[Array]) -> Tuple[List[Array], List[Tuple[int, ...]]]:
    """Flat copies of arrays, those of one type next to each other in memory, and the shapes.

    The engine reduces neighbours as one, without packing them first. The arrays that a graph passes to
    a callback belong to the framework, so they must be copied in any case.
    """
    if len(arrays) == 1:
        flat, shape = flat_copy(arrays[0])
        return [flat], [shape]
    pairs = [flat_view(array) for array in arrays]
    room = {
        dtype: np.empty(sum(flat.size for flat, _ in pairs if flat.dtype == dtype), dtype)
        for dtype in {flat.dtype for flat, _ in pairs}
    }
    taken = dict.fromkeys(room, 0)
    flats = []
    for flat, _ in pairs:
        start = taken[flat.dtype]
        taken[flat.dtype] = stop = start + flat.size
        target = room[flat.dtype][start:stop]
        target[:] = flat
        flats.append(target)
    return flats, [shape for _, shape in pairs]


def average(process_set: ProcessSet, op: ReduceOp = ReduceOp.AVERAGE) -> Reduction:
    """A plain reduction, without factors."""
    return Reduction(op, 1.0, 1.0, process_set)
