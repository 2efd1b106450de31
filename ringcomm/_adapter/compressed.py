"""Compressed reductions on NumPy arrays, for every framework: of a model's gradients, or of single arrays.

Each gradient is sent as :func:`~.compression.codec_for` says. What compression loses is kept by a
:class:`CompressionState`, which belongs to a model's first variable: gradient tapes and reducers come and go.
Single arrays have no such state, so there is no error feedback, and each is sent with the codec itself.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .. import api
from ..arrays.bridge import flat_copy
from ..dtypes import Array
from ..engine.request import Handle
from ..errors import ConfigError, ShapeError
from ..ops import CODECS, ReduceOp
from ..process_set import number_of, rank_in, size_of
from ..schedule.steps import even_bounds
from .arguments import wire_name
from .choice import AutoCompression
from .compression import NoneCompressor, PowerSGD, codec_for, compressor_of
from .feedback import Residuals, reset_all
from .gradients import Reduction
from .powersgd import Matrix, PowerIteration
from .waiting import run_all

Shape = Tuple[int, ...]


def is_coded(compression: Any) -> bool:
    """Whether the reduction executes the compression itself."""
    return getattr(compression, "kind", "") in ("int8", "int4", "powersgd", "auto")


def divided(compression: Any, op: ReduceOp) -> Tuple[Any, Any]:
    """Divide the compression of a single reduction in what the reduction executes and what converts tensors.

    Args:
        compression: a compressor, its name, or None.
        op: the reduction; those that do not add are executed without codes.

    Returns:
        a compressor for which :func:`is_coded` holds, or None; and one with ``compress`` and ``decompress``.

    Raises:
        ConfigError: no compressor has the name.
    """
    compressor = compressor_of(compression)
    if not is_coded(compressor):
        return None, compressor
    return compressor if op in (ReduceOp.AVERAGE, ReduceOp.SUM) else None, NoneCompressor


def sent_as(compression: Any, dtype: str, shape: Sequence[int]) -> str:
    """The codec for a gradient, also under a compression that other reductions execute as a conversion."""
    kind = getattr(compression, "kind", "")
    if kind in ("bf16", "fp16"):
        return str(kind) if dtype in ("float32", "float64") else "none"
    return codec_for(compression, dtype, shape)


class CompressionState:
    """What is kept of a model's gradients from step to step."""

    def __init__(self) -> None:
        self.residuals = Residuals()
        self._iterations: Dict[Tuple[Matrix, ...], PowerIteration] = {}
        self._auto: Optional[AutoCompression] = None

    def auto(self, compression: Any) -> Optional[AutoCompression]:
        """What chooses the compression, if the program leaves the choice; the same from step to step."""
        if isinstance(compression, AutoCompression) and self._auto is None:
            self._auto = compression
        return self._auto if isinstance(compression, AutoCompression) else None

    def iteration(self, matrices: Sequence[Matrix], rank: int) -> PowerIteration:
        """PowerSGD's thin matrices for these matrices, from the last step if there was one."""
        key = tuple(matrices)
        if key not in self._iterations:
            self._iterations[key] = PowerIteration(matrices, rank, self.residuals)
        return self._iterations[key]


_states: Dict[int, CompressionState] = {}


def state_of(owner: Any) -> CompressionState:
    """The state that belongs to an object, as long as that exists."""
    key = id(owner)
    if key not in _states:
        _states[key] = CompressionState()
        weakref.finalize(owner, _states.pop, key, None)
    return _states[key]


def residual_state_dict(variables: Sequence[Any]) -> Dict[str, Array]:
    """What compression has lost of the gradients on this rank and error feedback will add, for a checkpoint.

    Example::

        np.savez(f"residuals-{hvd.rank()}.npz", **hvd.residual_state_dict(model.trainable_variables))

    Args:
        variables: the model's trainable variables.

    Returns:
        copies as flat float32 arrays, by names that stay the same when the program is started again; empty
        without a compression that has error feedback. Every rank has its own.
    """
    return {
        f"{place}/{name}": array
        for place, variable in enumerate(variables) if id(variable) in _states
        for name, array in state_of(variable).residuals.state().items()
    }  # fmt: skip


def load_residual_state_dict(variables: Sequence[Any], state: Mapping[str, Array]) -> None:
    """Continue with the residuals of :func:`residual_state_dict`, after the model was loaded.

    Without this call training goes on with residuals of zero: one step's rounding error is lost.

    Args:
        variables: the model's trainable variables, in the same order.
        state: what the same rank has saved.

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
    """Forget what error feedback would add to the gradients of variables, and log it in one line."""
    known = [variable for variable in variables if id(variable) in _states]
    reset_all([state_of(variable).residuals for variable in known], why)


class CompressedAllreduce(NamedTuple):
    """Reduces ``inputs`` arrays as one operation, to callers; each codec's are one of the engine's.

    Attributes:
        how: the reduction.
        name: of the operation; None: it is matched by its order.
        inputs: how many.
        compression: a compressor for which :func:`is_coded` holds.
        state: what is kept of gradients from step to step; None: the arrays are no gradients of a model.
        has_weight: whether the last input is the weight of the others.
    """

    how: Reduction
    name: Optional[str]
    inputs: int
    compression: Any
    state: Optional[CompressionState] = None
    has_weight: bool = False

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Pending:
        """Submit it; the result is a list of new arrays.

        Raises:
            ConfigError: PowerSGD with a weight.
        """
        weight = self.how.weight_now()
        if self.has_weight:
            arrays, weight = arrays[:-1], float(arrays[-1])
        if weight is not None and isinstance(self.compression, PowerSGD):
            raise ConfigError("PowerSGD averages without weights: use Compression.int8 or Compression.bf16.")
        pairs = [flat_copy(array) for array in arrays]
        auto = None if self.state is None else self.state.auto(self.compression)
        compression = self.compression if auto is None else auto.current()
        groups: Dict[str, List[int]] = {}
        for index, (flat, shape) in enumerate(pairs):
            groups.setdefault(self._codec(compression, flat.dtype.name, shape), []).append(index)
        pending = Pending([flat.reshape(shape) for flat, shape in pairs], auto)
        if auto is not None:
            auto.submitting(sum(4 * flat.size for flat, _ in pairs))
        for codec in sorted(groups):
            flats = [pairs[index][0] for index in groups[codec]]
            shapes = [pairs[index][1] for index in groups[codec]]
            keys = [f"{self.name}/{index}" for index in groups[codec]]
            if codec == "powersgd":
                pending.power = _Power(self, keys, flats, shapes)
            else:
                pending.handles.append(self._submit(codec, keys, flats, shapes, urgent, weight))
        return pending

    def _codec(self, compression: Any, dtype: str, shape: Shape) -> str:
        if self.how.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            return "none"
        kind = str(getattr(compression, "kind", "none"))
        # The caller of a single reduction has chosen the codec for these arrays, whatever their shapes.
        return kind if self.state is None and kind in CODECS else sent_as(compression, dtype, shape)

    def part_name(self, part: str) -> str:
        """The name by which ranks match a part of the operation; empty: by its order."""
        return wire_name("allreduce", f"{self.name}.{part}" if self.name else None)

    def _submit(
        self, codec: str, keys: Sequence[str], flats: Sequence[Array], shapes: Sequence[Shape], urgent: bool,
        weight: Optional[float],
    ) -> Handle:  # fmt: skip
        kept: List[Array] = []
        if self.state is not None and codec in ("int8", "int4"):
            kept = [self.state.residuals.of(key, flat.size) for key, flat in zip(keys, flats)]
        return api.context().engine.allreduce(
            flats, self.how.op, self.part_name(codec), shapes, self.how.prescale,
            self.how.postscale, number_of(self.how.process_set), urgent, compression=codec, residuals=kept,
            weight=weight,
        )  # fmt: skip


class CompressedReducescatter(NamedTuple):
    """Reduces ``inputs`` arrays with codes; every rank gets its part of the rows.

    It is a :class:`CompressedAllreduce` without state of which every rank keeps its rows: with int8 that
    sends half of what a reduce-scatter of float32 sends.
    """

    how: Reduction
    name: Optional[str]
    inputs: int
    compression: Any

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Pending:
        """Submit it; the result is a list of new arrays.

        Raises:
            ShapeError: an array has no first dimension.
        """
        if not all(array.ndim for array in arrays):
            raise ShapeError(
                "reducescatter divides the first dimension, and a zero-dimensional array has none."
            )
        whole = CompressedAllreduce(self.how, self.name, self.inputs, self.compression)
        pending = whole.start(arrays, urgent)
        rank, size = rank_in(self.how.process_set), size_of(self.how.process_set)
        edges = [even_bounds(len(array), size)[rank : rank + 2] for array in arrays]
        pending.rows = [slice(*edge) for edge in edges]
        return pending


class _Power:
    """The two reductions of PowerSGD: :meth:`start` has submitted the first."""

    def __init__(
        self, operation: CompressedAllreduce, keys: Sequence[str], flats: List[Array], shapes: Sequence[Shape]
    ) -> None:
        self._how, self._part_name, self._flats = operation.how, operation.part_name, flats
        compression: PowerSGD = operation.compression
        matrices = [
            Matrix(key, shape[0], flat.size // shape[0]) for key, flat, shape in zip(keys, flats, shapes)
        ]
        state = CompressionState() if operation.state is None else operation.state
        self._iteration = state.iteration(matrices, compression.rank)
        if self._how.prescale != 1.0:
            for flat in flats:
                np.multiply(flat, np.float32(self._how.prescale), out=flat)
        self._iteration.add_residuals(flats)
        self._iteration.make_left(flats)
        self.first = self._average(self._iteration.left, "left")

    def _average(self, array: Array, side: str) -> Handle:
        name, process_set = self._part_name(f"powersgd.{side}"), number_of(self._how.process_set)
        return api.context().engine.allreduce([array], ReduceOp.AVERAGE, name, process_set=process_set)

    def complete(self) -> None:
        """Wait for the first reduction, make the second, and write the result over the gradients."""
        self.first.wait()
        self._iteration.make_right(self._flats)
        self._average(self._iteration.right, "right").wait()
        size = size_of(self._how.process_set) if self._how.op == ReduceOp.SUM else 1
        self._iteration.finish(self._flats, self._how.postscale * size)


class Pending:
    """Compressed reductions in progress, with the methods of a handle that callbacks use.

    Args:
        results: the arrays that the reductions overwrite.
        auto: what chooses the compression, if the program leaves the choice.

    Attributes:
        handles: of the engine's reductions.
        power: the reductions of PowerSGD, if there are any.
        rows: of each result, the rows that this rank gets; None: all.
    """

    def __init__(self, results: List[Array], auto: Optional[AutoCompression] = None) -> None:
        self._results = results
        self._auto = auto
        self.handles: List[Handle] = []
        self.power: Optional[_Power] = None
        self.rows: Optional[List[slice]] = None

    def block(self, timeout_s: Optional[float]) -> bool:
        """Sleep until what was submitted has ended, or for so long each; whether it has."""
        handles = self.handles if self.power is None else [*self.handles, self.power.first]
        ended = [handle.block(timeout_s) for handle in handles]
        return all(ended)

    def wait(self) -> List[Array]:
        """The reduced gradients, in order.

        Raises:
            RingcommError: a reduction failed; the others have ended.
        """
        waiting_from_s = time.perf_counter()
        steps: List[Callable[[], Any]] = [handle.wait for handle in self.handles]
        run_all(steps if self.power is None else [*steps, self.power.complete])
        if self._auto is not None:
            self._auto.finished(sum(4 * array.size for array in self._results), waiting_from_s)
        if self.rows is not None:
            return [array[own].copy() for array, own in zip(self._results, self.rows)]
        return self._results
