"""The host's side of a compiled program: collectives on NumPy arrays. Nothing here calls JAX.

A callback that called JAX could wait for a thread of XLA's pool while it occupies the only one.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence

import numpy as np

from .. import api
from .._adapter.graph_callbacks import (
    Batch,
    Operation,
    can_be_in_order,
    overwrite_in_order,
    run_in_order,
)  # fmt: skip
from .._adapter.submit import record_cause
from ..calls.async_calls import SequenceName
from ..calls.process_set import number_of, rank_in, size_of
from ..collective.observe import Site
from ..collective.rows import scatter_layout
from ..dtypes import Array
from ..errors import MismatchError, ShapeError

# The default name of operations in compiled programs that are matched by name; JAX executes them in order.
SEQUENCE = SequenceName("jax.jit")

NO_SPLITS = np.zeros(0, np.int32)  # an alltoall's row counts: every rank gets the same number of rows


class SetPosition(NamedTuple):
    """This rank's position in a process set, and the set's size, where shapes depend on them."""

    position: int
    size: int


def place_for(operation: Operation) -> Optional[SetPosition]:
    """Return the place that a program is compiled for; None: it fits every number of ranks.

    NotInitializedError: this process is not in a job. UnknownProcessSetError: the set is not registered, or
    this rank is not a member.
    """
    process_set = operation.how.process_set
    api.context().engine.sets.check_member(number_of(process_set))
    if operation.kind in ("reducescatter", "allgather", "alltoall"):
        return SetPosition(rank_in(process_set), size_of(process_set))
    return None


class HostCall(NamedTuple):
    """A collective in a compiled program, where shapes are fixed."""

    operation: Operation
    place: Optional[SetPosition]  # the program was compiled for it
    site: Site  # of the call in the program

    @property
    def overwrites(self) -> bool:
        """Return whether the arrays of :meth:`run_now` receive the results."""
        operation = self.operation
        return operation.keeps_shapes and not operation.has_weight and not operation.is_coded

    def run(self, arrays: Sequence[Array]) -> List[Array]:
        """Execute it; return new arrays, or the given ones where these are not read any more.

        MismatchError: the number of ranks has changed since the program was compiled.
        """
        operation, place = self.operation, self.place
        if place is None:
            return self._execute(arrays)
        if place_for(operation) != place:
            error = MismatchError(
                f"This program was compiled for rank {place.position} of {place.size}, and the ranks have "
                "changed since. Call jax.clear_caches() after ringcomm.init()."
            )
            record_cause(error)
            raise error
        if operation.kind == "allgather":
            # As one row of equal shape each, so that ranks with other numbers of rows get an error.
            gathered = self._execute([array[np.newaxis] for array in arrays])
            return [part.reshape(-1, *array.shape[1:]) for part, array in zip(gathered, arrays)]
        if operation.kind == "alltoall":
            blocks = arrays[0].reshape(place.size, -1, *arrays[0].shape[1:])
            return [self._execute([blocks, NO_SPLITS])[0].reshape(arrays[0].shape)]
        return self._execute(arrays)

    @property
    def is_in_order(self) -> bool:
        """Return whether it is a call in order. Otherwise ranks match it by name."""
        return can_be_in_order(self.operation)

    def run_now(self, arrays: Sequence[Array]) -> List[Array]:
        """Execute it outside of compiled programs, where ranks may have different numbers of rows.

        Return the results; if it :attr:`overwrites`, in the given arrays.
        """
        if self.overwrites:
            if self.is_in_order:
                overwrite_in_order(self.operation, arrays, self.site)
            else:
                Batch([self.operation]).overwrite(arrays)
            return list(arrays)
        alone = self.operation.kind == "alltoall" and len(arrays) == 1
        return self._execute([*arrays, NO_SPLITS] if alone else arrays, None)

    def _execute(self, arrays: Sequence[Array], name: Optional[str] = SEQUENCE) -> List[Array]:
        if self.is_in_order:
            return run_in_order(self.operation, arrays, self.site)
        operation = self.operation if self.operation.name else self.operation._replace(name=name)
        return Batch([operation]).run(arrays)


def rows_of(kind: str, shape: Sequence[int]) -> int:
    """Return the first dimension of an array; ShapeError without dimensions."""
    if not shape:
        raise ShapeError(f"{kind} needs an array with at least one dimension, to divide it by rows.")
    return shape[0]


def results_of(call: HostCall, shapes: Sequence[Sequence[int]]) -> List[List[int]]:
    """Return the shapes of a call's results from those of its arrays."""
    operation, place = call.operation, call.place
    results = [list(shape) for shape in (shapes[:-1] if operation.has_weight else shapes)]
    if place is None:
        return results
    for shape in results:
        rows = rows_of(operation.kind, shape)
        if operation.kind == "allgather":
            shape[0] = rows * place.size
        elif operation.kind == "reducescatter":
            edges = edges_of(operation, rows, place.size)
            shape[0] = edges[place.position + 1] - edges[place.position]
    return results


def edges_of(operation: Operation, rows: int, size: int) -> Sequence[int]:
    """Return the boundaries between the ranks' parts of ``rows`` rows in a reducescatter."""
    return scatter_layout([(rows,)], size, operation.how.options).edges[0]
