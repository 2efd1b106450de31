"""Collectives of programs that a framework executes in order, as calls in order: nothing is announced first.

A call in order is one exchange between the ranks; an operation by name is announced to rank 0, which
responds, and only then is it executed. The framework must execute these collectives one after another, in the
same order on all ranks. Direct calls of the program may be between them if they wait for the framework first;
see :func:`ringcomm.api.before_calls`.
"""

from __future__ import annotations

import threading
import zlib
from contextlib import contextmanager
from typing import Iterator, List, Sequence, Tuple

import numpy as np

from .. import api
from ..calls.process_set import number_of
from ..collective.observe import Site
from ..collective.rows import row_counts
from ..dtypes import Array
from ..engine.bucket_runner import FusionBuffer, groups_by_index, side_by_side
from ..errors import Misuse, RingcommError, fresh_copy
from ..job.context import Context
from ..ops import ReduceOp
from .graph_callbacks import Operation
from .submit import record_cause

_SHAPES_SHOWN = 16

_packed = FusionBuffer()  # used within Context.calls_of, by one thread at a time
_here = threading.local()


def can_be_in_order(operation: Operation) -> bool:
    """Return whether an operation can be a call in order: of all ranks, without a name, weights or codes."""
    how = operation.how
    if operation.name is not None or operation.has_weight or how.weight is not None or operation.is_coded:
        return False
    return not number_of(how.process_set)


def is_inside() -> bool:
    """Return whether this thread is executing a call in order."""
    return getattr(_here, "inside", False)


def overwrite(operation: Operation, arrays: Sequence[Array], site: Site) -> None:
    """Execute an allreduce or a broadcast on writable, contiguous arrays, which receive the results."""
    with _recorded(site) as context:
        if len(arrays) == 1:
            _overwrite(context, operation, arrays[0])
            return
        label = _shapes(arrays)
        for indices in groups_by_index(arrays):
            group = [arrays[index] for index in indices]
            if len(group) == 1 or _is_adasum(operation):
                for array in group:
                    _overwrite(context, operation, array, label)
                continue
            packed, unpack = side_by_side([array.reshape(-1) for array in group], _packed)
            _overwrite(context, operation, packed, label)
            unpack()


def run(operation: Operation, arrays: Sequence[Array], site: Site) -> List[Array]:
    """Execute an operation on inputs as for :class:`~.graph_callbacks.Batch`; return new arrays."""
    if operation.keeps_shapes:
        copies = [np.array(array, order="C") for array in arrays]
        overwrite(operation, copies, site)
        return copies
    with _recorded(site) as context:
        if operation.kind == "barrier":
            context.barrier()
            return []
        if operation.kind == "alltoall":
            rows, splits = arrays
            counts = row_counts(len(rows), splits.tolist() if splits.size else None, context.size)
            received, numbers = context.alltoall(rows, counts)
            return [received, np.asarray(numbers, np.int32)]
        if operation.kind == "allgather":
            # Each rank can have another number of rows.
            label = _label([array.shape[1:] for array in arrays]) if len(arrays) > 1 else None
            return [context.allgather(array, label) for array in arrays]
        label = _shapes(arrays) if len(arrays) > 1 else None
        how = operation.how
        options = how.options._replace(
            op=how.op, name=label, prescale_factor=how.prescale, postscale_factor=how.postscale,
            compression=None,
        )  # fmt: skip
        return [context.reduced_rows(array, "", options) for array in arrays]


@contextmanager
def _recorded(site: Site) -> Iterator[Context]:
    """Yield the context, in a block of calls whose errors frameworks can be asked for."""
    _here.inside = True
    try:
        context = api.context()
        with context.group.runner.calls_of(site):
            yield context
    except Misuse as problem:
        # Several programs may have been started before the first one failed: each raises the failure.
        failure = problem.__cause__
        if not isinstance(failure, RingcommError):
            record_cause(problem)
            raise
        error = fresh_copy(failure)
        record_cause(error)
        raise error from None
    except RingcommError as error:
        record_cause(error)
        raise
    finally:
        _here.inside = False


def _overwrite(context: Context, operation: Operation, array: Array, label: str = "") -> None:
    if operation.kind == "broadcast":
        context.broadcast_(array, operation.root_rank, label or None)
    else:
        how = operation.how
        context.allreduce_(array, how.op, label or None, how.prescale, how.postscale)


def _is_adasum(operation: Operation) -> bool:
    return operation.kind == "allreduce" and operation.how.op == ReduceOp.ADASUM


def _shapes(arrays: Sequence[Array]) -> str:
    return _label([array.shape for array in arrays])


def _label(shapes: Sequence[Tuple[int, ...]]) -> str:
    """Return the shapes of a group as the name of its calls, so that ranks with other groups get an error."""
    shown = ", ".join(map(str, shapes[:_SHAPES_SHOWN]))
    more = f", ... ({zlib.crc32(repr(shapes).encode()):x})" if len(shapes) > _SHAPES_SHOWN else ""
    return f"{len(shapes)} arrays: {shown}{more}"
