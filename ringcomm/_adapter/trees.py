"""Nested state of arrays: split it into its arrays and the structure, and run collectives on all of them."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..calls.process_set import ProcessSet, size_of
from ..collective.options import Options
from ..collective.rows import row_counts
from ..ops import weight_of
from .compression import is_elementwise
from .graph_callbacks import Operation
from .reduction import Reduction


class Leaf(NamedTuple):
    """Placeholder for the array with this index."""

    number: int


def take_apart(tree: Any, is_array: Callable[[Any], bool]) -> Tuple[Any, List[Any]]:
    """Copy nested dicts, lists and tuples with a :class:`Leaf` for every array; return it and the arrays."""
    arrays: List[Any] = []

    def copied(node: Any) -> Any:
        if is_array(node):
            arrays.append(node)
            return Leaf(len(arrays) - 1)
        if isinstance(node, dict):
            return {key: copied(value) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(copied(item) for item in node)
        return node

    return copied(tree), arrays


def put_together(tree: Any, arrays: Sequence[Any]) -> Any:
    """Return the structure with its arrays, the inverse of :func:`take_apart`."""
    if isinstance(tree, Leaf):
        return arrays[tree.number]
    if isinstance(tree, dict):
        return {key: put_together(value, arrays) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(put_together(item, arrays) for item in tree)
    return tree


Rebuild = Callable[[Sequence[Any]], Any]  # makes a tree, like the given one, of other arrays
Execute = Callable[[Operation, List[Any]], Sequence[Any]]


class TreeCollectives:
    """Execute collectives on all arrays of a tree as one operation; without arrays it needs no other rank.

    ``leaves`` returns a tree's arrays, and the function that joins results to a tree. ``execute`` runs an
    operation on arrays of the framework; the weight of a reduction is the last input, in the form that
    ``weights`` returns.
    """

    def __init__(
        self, leaves: Callable[[Any], Tuple[List[Any], Rebuild]], execute: Execute,
        weights: Callable[[Any], List[Any]] = lambda weight: [np.float64(weight_of(weight))],
    ) -> None:  # fmt: skip
        self._leaves = leaves
        self._weights = weights
        self._execute = execute

    def allreduce(self, tree: Any, options: Options) -> Any:
        """Reduce a tree."""
        return self._reduce("allreduce", tree, Reduction.of(options), options)

    def reducescatter(self, tree: Any, options: Options) -> Any:
        """Reduce a tree; the result has this rank's rows of each array."""
        return self._reduce("reducescatter", tree, Reduction.of_rows(options), options)

    def _reduce(self, kind: str, tree: Any, how: Reduction, options: Options) -> Any:
        weights = [] if options.weight is None else self._weights(options.weight)
        arrays, rebuild = self._leaves(tree)
        if not arrays:
            return tree
        sent, restore = arrays, None
        if not (isinstance(arrays[0], np.ndarray) and is_elementwise(how.compression)):
            how, sent, restore = how.prepared(arrays)
        inputs = [*sent, *weights]
        operation = Operation(kind, how, options.name, len(inputs), has_weight=bool(weights))
        results = self._execute(operation, inputs)
        return rebuild(results if restore is None else restore(results))

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
        """Exchange rows of one array; with ``splits`` return a pair of the rows and their numbers by rank."""
        (array,), _ = self._leaves(value)
        counts: Any = () if splits is None else np.asarray(splits)
        if array.ndim:
            row_counts(array.shape[0], None if splits is None else counts, size_of(process_set))
        operation = Operation("alltoall", Reduction(process_set=process_set), name, 2)
        rows, numbers = self._execute(operation, [array, counts])
        return rows if splits is None else (rows, numbers)
