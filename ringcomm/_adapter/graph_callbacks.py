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
import time
import weakref
import zlib
from contextlib import contextmanager
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)  # fmt: skip

import numpy as np

from .. import api
from ..arrays.operands import HostOperand, Operand, flat_copy, flat_view
from ..calls.async_calls import wire_name
from ..calls.process_set import ProcessSet, number_of, size_of
from ..collective.observe import Site
from ..collective.options import Options
from ..collective.rows import row_counts
from ..dtypes import Array
from ..engine.bucket_runner import FusionBuffer, groups_by_index, side_by_side
from ..engine.request import Handle
from ..errors import ConfigError, Misuse, RingcommError, fresh_copy
from ..job.context import Context
from ..ops import BLOCKWISE, CODECS, HALVES, ReduceOp, weight_of
from .compression import AutoCompression, Residuals, codec_for, is_elementwise, reset_all
from .reduction import Reduction
from .submit import (
    finish_earlier,
    record_cause,
    run_all,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)

AnyHandle = Union[Handle, "Pending"]


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
        return getattr(self.how.compression, "kind", "none") != "none"

    @property
    def keeps_shapes(self) -> bool:
        """Return whether results have the shapes of the arrays, so that they can overwrite them."""
        return self.kind in ("allreduce", "broadcast")

    def start(self, arrays: Sequence[Array], urgent: bool = False, in_place: bool = False) -> AnyHandle:
        """Submit it; the handle returns a list of arrays, or None for a barrier. ``urgent``: the caller waits
        for it next. ``in_place`` overwrites the arrays, which are contiguous, if it :attr:`keeps_shapes`.
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
    """Operations that a rank submits together, each with its ``inputs`` of the arrays."""

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
        """Submit all operations and wait for all, also if one fails; return their results in order."""
        return self._wait(self._submit(arrays, urgent=True))

    def overwrite(self, arrays: Iterable[Array]) -> None:
        """Run the operations so that the arrays, writable and contiguous, receive the results."""
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
    """Return contiguous arrays to overwrite, or copies of the framework's, contiguous by dtype."""
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


# ---- calls in order ----------------------------------------------------------------------------------------

# Collectives of programs that a framework executes in order, on all ranks in the same: nothing is announced
# first. A call in order is one exchange between the ranks; an operation by name is announced to rank 0, which
# responds, and only then is it executed. Direct calls of the program may be between them if they wait for the
# framework first; see :func:`ringcomm.api.before_calls`.

_SHAPES_SHOWN = 16

_packed = FusionBuffer()  # used within Context.calls_of, by one thread at a time
_here = threading.local()


def can_be_in_order(operation: Operation) -> bool:
    """Return whether an operation can be a call in order: of all ranks, without a name, weights or codes."""
    how = operation.how
    if operation.name is not None or operation.has_weight or how.weight is not None or operation.is_coded:
        return False
    return not number_of(how.process_set)


def is_in_order() -> bool:
    """Return whether this thread is executing a call in order."""
    return getattr(_here, "inside", False)


def overwrite_in_order(operation: Operation, arrays: Sequence[Array], site: Site) -> None:
    """Execute an allreduce or a broadcast on writable, contiguous arrays, which receive the results."""
    with _recorded(site) as context:
        if len(arrays) == 1:
            _overwrite_one(context, operation, arrays[0])
            return
        label = _label([array.shape for array in arrays])
        adasum = operation.kind == "allreduce" and operation.how.op == ReduceOp.ADASUM
        for indices in groups_by_index(arrays):
            group = [arrays[index] for index in indices]
            if len(group) == 1 or adasum:
                for array in group:
                    _overwrite_one(context, operation, array, label)
                continue
            packed, unpack = side_by_side([array.reshape(-1) for array in group], _packed)
            _overwrite_one(context, operation, packed, label)
            unpack()


def run_in_order(operation: Operation, arrays: Sequence[Array], site: Site) -> List[Array]:
    """Execute an operation on inputs as for :class:`~.graph_callbacks.Batch`; return new arrays."""
    if operation.keeps_shapes:
        copies = [np.array(array, order="C") for array in arrays]
        overwrite_in_order(operation, copies, site)
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
        label = _label([array.shape for array in arrays]) if len(arrays) > 1 else None
        return [context.reduced_rows(array, "", operation.how.call(label)) for array in arrays]


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


def _overwrite_one(context: Context, operation: Operation, array: Array, label: str = "") -> None:
    if operation.kind == "broadcast":
        context.broadcast_(array, operation.root_rank, label or None)
    else:
        how = operation.how
        context.allreduce_(array, how.op, label or None, how.prescale, how.postscale)


def _label(shapes: Sequence[Tuple[int, ...]]) -> str:
    """Return the shapes of a group as the name of its calls, so that ranks with other groups get an error."""
    shown = ", ".join(map(str, shapes[:_SHAPES_SHOWN]))
    more = f", ... ({zlib.crc32(repr(shapes).encode()):x})" if len(shapes) > _SHAPES_SHOWN else ""
    return f"{len(shapes)} arrays: {shown}{more}"


# ---- trees of arrays ---------------------------------------------------------------------------------------


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
    ``leaves`` returns a tree's arrays, and the function that joins results to a tree. The weight of a
    reduction is the last input of ``execute``, in the form that ``weights`` returns.
    """

    def __init__(
        self, leaves: Callable[[Any], Tuple[List[Any], Rebuild]], execute: Execute,
        weights: Callable[[Any], List[Any]] = lambda weight: [np.float64(weight_of(weight))],
    ) -> None:  # fmt: skip
        self._leaves = leaves
        self._weights = weights
        self._execute = execute

    def allreduce(self, tree: Any, options: Options) -> Any:
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


# ---- compressed reductions: of a model's gradients, or of single arrays ------------------------------------

# Each gradient is sent as :func:`~.compression.codec_for` says. A :class:`CompressionState`, which belongs to
# a model's first variable, keeps the compression error: gradient tapes and reducers come and go. Single
# arrays have no such state, so there is no error feedback, and each is sent with the codec itself.


class CompressionState:
    """The state of a model's gradients from step to step."""

    def __init__(self) -> None:
        self.residuals = Residuals()
        self._auto: Optional[AutoCompression] = None

    def auto(self, compression: Any) -> Optional[AutoCompression]:
        """Return the program's :class:`AutoCompression`, the same in all steps; None: no automatic choice."""
        if isinstance(compression, AutoCompression) and self._auto is None:
            self._auto = compression
        return self._auto if isinstance(compression, AutoCompression) else None


_states: Dict[int, CompressionState] = {}


def state_of(owner: Any) -> CompressionState:
    """Return the state that belongs to an object, as long as that exists."""
    key = id(owner)
    if key not in _states:
        _states[key] = CompressionState()
        weakref.finalize(owner, _states.pop, key, None)
    return _states[key]


def residual_state_dict(variables: Sequence[Any]) -> Dict[str, Array]:
    """Return the residuals of this rank for a checkpoint.

    Residuals are rounding errors of compression, which error feedback adds to the next gradients.

    Example::

        np.savez(f"residuals-{hvd.rank()}.npz", **hvd.residual_state_dict(model.trainable_variables))

    Args:
        variables: the model's trainable variables.

    Returns:
        a dictionary of copies as flat float32 arrays. The names stay the same when the program is started
        again. It is empty if the compression has no error feedback. Every rank has its own residuals.
    """
    return {
        f"{place}/{name}": array
        for place, variable in enumerate(variables) if id(variable) in _states
        for name, array in state_of(variable).residuals.state().items()
    }  # fmt: skip


def load_residual_state_dict(variables: Sequence[Any], state: Mapping[str, Array]) -> None:
    """Continue with the residuals of :func:`residual_state_dict`, after the model was loaded.

    Without this call, training continues with residuals of zero: the rounding errors of one step are lost.

    Args:
        variables: the model's trainable variables, in the same order.
        state: the residuals that the same rank has saved.

    Raises:
        ConfigError: the state is of a model with more variables.
    """
    listed = list(variables)
    found: Dict[int, Dict[str, Array]] = {}
    for key, array in state.items():
        place, _, name = key.partition("/")
        found.setdefault(int(place), {})[name] = array
    if found and max(found) >= len(listed):
        raise ConfigError(
            f"These residuals are of a model with {max(found) + 1} or more trainable variables, and this one "
            f"has {len(listed)}."
        )
    for number, variable in enumerate(listed):
        if number in found or id(variable) in _states:
            state_of(variable).residuals.load(found.get(number, {}))


def drop_residuals(variables: Sequence[Any], why: str) -> None:
    """Forget the residuals of variables' gradients, and log it in one line."""
    known = [variable for variable in variables if id(variable) in _states]
    reset_all([state_of(variable).residuals for variable in known], why)


def start_coded(
    how: Reduction, name: Optional[str], arrays: Sequence[Array], urgent: bool = False,
    weight: Optional[float] = None, state: Optional[CompressionState] = None, in_place: bool = False,
) -> Pending:  # fmt: skip
    """Start an allreduce: one operation to its callers, one engine operation for the arrays of each codec.
    ``state`` keeps gradients' residuals; None: the arrays are not gradients.
    """
    pairs = [(array.reshape(-1), array.shape) if in_place else flat_copy(array) for array in arrays]
    auto = None if state is None else state.auto(how.compression)
    compression = how.compression if auto is None else auto.current()
    groups: Dict[str, List[int]] = {}
    for index, (flat, shape) in enumerate(pairs):
        codec = _codec(how, compression, state is not None, flat.dtype.name, shape)
        groups.setdefault(codec, []).append(index)
    pending = Pending([flat.reshape(shape) for flat, shape in pairs], auto)
    if auto is not None:
        auto.submitting(sum(4 * flat.size for flat, _ in pairs))
    for codec in sorted(groups):
        flats = [pairs[index][0] for index in groups[codec]]
        shapes = [pairs[index][1] for index in groups[codec]]
        keys = [f"{name}/{index}" for index in groups[codec]]
        label = f"{name}.{codec}" if name else None
        residuals: List[Array] = []
        if state is not None and codec in BLOCKWISE:
            residuals = [state.residuals.of(key, flat.size) for key, flat in zip(keys, flats)]
        if state is not None:
            finish_earlier("allreduce", label, how.process_set)
        handle = api.context().engine.allreduce(
            flats, how.call(label, weight, codec), wire_name("allreduce", label), shapes,
            number_of(how.process_set), urgent, residuals=residuals,
        )  # fmt: skip
        pending.handles.append(handle)
    return pending


def _codec(how: Reduction, compression: Any, is_gradient: bool, dtype: str, shape: Tuple[int, ...]) -> str:
    if not how.adds:
        return "none"
    kind = str(getattr(compression, "kind", "none"))
    if not is_gradient and kind in CODECS:  # the caller has chosen it for these arrays, whatever their shapes
        return kind
    if kind in HALVES:  # also if other reductions execute the compression as a conversion
        return kind if dtype in ("float32", "float64") else "none"
    return codec_for(compression, dtype, shape)


class Pending:
    """Compressed reductions in progress, with the methods of a handle that callbacks use."""

    def __init__(self, results: List[Array], auto: Optional[AutoCompression] = None) -> None:
        self._results = results
        self._auto = auto
        self.handles: List[Handle] = []

    def attend(self) -> None:
        """Wait until all reductions have ended; see :meth:`.Handle.attend`."""
        for handle in self.handles:
            handle.attend()

    def wait(self) -> List[Array]:
        """Return the reduced gradients, in order, after all reductions have ended, also if one failed."""
        waiting_from_s = time.perf_counter()
        run_all([handle.wait for handle in self.handles])
        if self._auto is not None:
            self._auto.finished(sum(4 * array.size for array in self._results), waiting_from_s)
        return self._results
