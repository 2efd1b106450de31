"""The collectives of a framework on trees of its arrays, or on single values: what their functions share."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from ..calls.process_set import ProcessSet, size_of
from ..collective.rows import row_counts
from ..ops import ReduceOp, op_of
from .arguments import scattered_reduction
from .graph_callbacks import Operation
from .reduction import Reduction

Rebuild = Callable[[Sequence[Any]], Any]
"""Makes a tree, like the one that was given, of other arrays."""
Execute = Callable[[Operation, List[Any]], Sequence[Any]]


class TreeCollectives:
    """Executes collectives on all arrays of a tree as one operation; without arrays it needs no other rank.

    Args:
        leaves: returns a tree's arrays, and what makes a tree of their results.
        execute: executes an operation on arrays of the framework, and returns its results as such. The weight
            of an allreduce is the last input.
    """

    def __init__(self, leaves: Callable[[Any], Tuple[List[Any], Rebuild]], execute: Execute) -> None:
        self._leaves = leaves
        self._execute = execute

    def allreduce(
        self,
        tree: Any,
        op: Optional[ReduceOp],
        name: Optional[str],
        compression: Any,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        weights: Sequence[Any],
    ) -> Any:
        """Reduce a tree; ``weights`` has the weight of this rank, or nothing."""
        how = Reduction(_op(op), float(prescale), float(postscale), process_set, compression=compression)
        arrays, rebuild = self._leaves(tree)
        if not arrays:
            return tree
        how, sent, restore = how.prepared(arrays)
        inputs = [*sent, *weights]
        operation = Operation("allreduce", how, name, len(inputs), has_weight=bool(weights))
        return rebuild(restore(self._execute(operation, inputs)))

    def reducescatter(
        self,
        tree: Any,
        op: Optional[ReduceOp],
        name: Optional[str],
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
    ) -> Any:
        """Reduce a tree; the result has this rank's rows of each array."""
        how = Reduction(scattered_reduction(_op(op)), float(prescale), float(postscale), process_set)
        return self._of_all("reducescatter", tree, how, name)

    def allgather(self, tree: Any, name: Optional[str], process_set: ProcessSet) -> Any:
        """Gather the rows of all ranks, for each array of a tree."""
        return self._of_all("allgather", tree, Reduction(process_set=process_set), name)

    def broadcast(self, tree: Any, root_rank: int, name: Optional[str], process_set: ProcessSet) -> Any:
        """Send the root's arrays to all ranks."""
        return self._of_all("broadcast", tree, Reduction(process_set=process_set), name, root_rank)

    def _of_all(self, kind: str, tree: Any, how: Reduction, name: Optional[str], root_rank: int = 0) -> Any:
        arrays, rebuild = self._leaves(tree)
        if not arrays:
            return tree
        return rebuild(self._execute(Operation(kind, how, name, len(arrays), root_rank), arrays))

    def alltoall(self, value: Any, splits: Any, name: Optional[str], process_set: ProcessSet) -> Any:
        """Exchange rows of one array; with ``splits`` a pair of the rows and their numbers by rank."""
        (array,), _ = self._leaves(value)
        counts: Any = () if splits is None else np.asarray(splits)
        if array.ndim:
            row_counts(array.shape[0], None if splits is None else counts, size_of(process_set))
        operation = Operation("alltoall", Reduction(process_set=process_set), name, 2)
        rows, numbers = self._execute(operation, [array, counts])
        return rows if splits is None else (rows, numbers)


def _op(op: Optional[Any]) -> ReduceOp:
    return ReduceOp.AVERAGE if op is None else op_of(op)
