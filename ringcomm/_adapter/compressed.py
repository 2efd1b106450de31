"""Compressed reductions on NumPy arrays, for every framework: of a model's gradients, or of single arrays.

Each gradient is sent as :func:`~.compression.codec_for` says. What compression loses is kept by a
:class:`CompressionState`, which belongs to a model's first variable: gradient tapes and reducers come and go.
Single arrays have no such state, so there is no error feedback, and each is sent with the codec itself.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from .. import api
from ..arrays.bridge import flat_copy
from ..calls.process_set import number_of, rank_in, size_of
from ..collective.rows import check_rows, scatter_layout
from ..dtypes import Array
from ..engine.request import Handle
from ..errors import ConfigError
from ..ops import CODECS, ReduceOp
from .arguments import wire_name
from .choice import AutoCompression
from .compression import BLOCKWISE, PowerSGD, codec_for
from .feedback import Residuals, reset_all
from .powersgd import Matrix, PowerIteration
from .reduction import Reduction
from .submit import finish_earlier
from .waiting import run_all

Shape = Tuple[int, ...]


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
        """Return what chooses the compression, if the program leaves the choice.

        The same from step to step.
        """
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
    """Return what compression has lost of this rank's gradients and error feedback adds, for a checkpoint.

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


def start_coded(
    how: Reduction, name: Optional[str], arrays: Sequence[Array], urgent: bool = False,
    weight: Optional[float] = None, state: Optional[CompressionState] = None, in_place: bool = False,
) -> Pending:  # fmt: skip
    """Start an allreduce to its callers one operation; the arrays of each codec are one of the engine's.

    Args:
        how: the reduction, with one of ringcomm's compressors.
        name: of the operation; None: it is matched by its order.
        arrays: those to reduce.
        urgent: whether the caller waits for it next.
        weight: of this rank's arrays in a weighted average; None: there are none.
        state: what is kept of gradients from step to step; None: the arrays are no gradients of a model.
        in_place: overwrite the arrays, which are contiguous; otherwise the results are new arrays.

    Returns:
        the reductions in progress; they have the results as a list.

    Raises:
        ConfigError: PowerSGD with a weight.
    """
    if weight is not None and isinstance(how.compression, PowerSGD):
        raise ConfigError("PowerSGD averages without weights: use Compression.int8 or Compression.bf16.")
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
        if codec == "powersgd":
            matrices = [
                Matrix(key, shape[0], flat.size // shape[0]) for key, flat, shape in zip(keys, flats, shapes)
            ]
            kept = CompressionState() if state is None else state
            pending.power = PowerReduction(kept.iteration(matrices, compression.rank), how, label)
            pending.power.start(flats)
            continue
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


def start_coded_rows(
    how: Reduction, name: Optional[str], arrays: Sequence[Array], urgent: bool = False,
    weight: Optional[float] = None,
) -> Pending:  # fmt: skip
    """Start a reducescatter with PowerSGD: an allreduce of which every rank keeps its rows.

    The arguments are those of :func:`start_coded`.

    Raises:
        ShapeError: an array has no first dimension.
        ConfigError: there is a list of sizes, which the ranks could not compare.
    """
    if how.options.splits is not None:
        raise ConfigError("PowerSGD divides rows evenly: with splits use Compression.int8 or .bf16.")
    shapes = [array.shape for array in arrays]
    check_rows("reducescatter", shapes)
    rank, layout = rank_in(how.process_set), scatter_layout(shapes, size_of(how.process_set), how.options)
    pending = start_coded(how, name, arrays, urgent, weight)
    pending.rows = [slice(*edges[rank : rank + 2]) for edges in layout.edges]
    return pending


def _codec(how: Reduction, compression: Any, is_gradient: bool, dtype: str, shape: Shape) -> str:
    if not how.adds:
        return "none"
    kind = str(getattr(compression, "kind", "none"))
    # The caller of a single reduction has chosen the codec for these arrays, whatever their shapes.
    return kind if not is_gradient and kind in CODECS else sent_as(compression, dtype, shape)


class PowerReduction:
    """The two reductions of PowerSGD for some matrices.

    Args:
        iteration: the thin matrices, and the residuals.
        how: the reduction.
        name: of the operation; None: its parts are matched by their order.

    Attributes:
        iteration: as passed.
        first: the handle of the first reduction, once it is submitted.
        running: whether the engine may be writing to the thin matrices.
    """

    def __init__(self, iteration: PowerIteration, how: Reduction, name: Optional[str]) -> None:
        self.iteration, self._how, self._name = iteration, how, name
        self._gradients: List[Array] = []
        self.first: Optional[Handle] = None
        self._second: Optional[Handle] = None
        self.running = False

    def start(self, gradients: List[Array], absent: int = 0) -> None:
        """Submit the first reduction.

        Args:
            gradients: one float32 array per matrix, flat; they receive the results.
            absent: as for ``Engine.allreduce``.
        """
        self._gradients, self.running = gradients, True
        if self._how.prescale != 1.0:
            for gradient in gradients:
                np.multiply(gradient, np.float32(self._how.prescale), out=gradient)
        self.iteration.add_residuals(gradients)
        self.iteration.make_left(gradients)
        self.first = self._average(self.iteration.left, "left", absent)

    def advance(self) -> int:
        """Wait for the first reduction, and submit the second; returns the gradients that no rank has."""
        assert self.first is not None
        self.first.wait()
        self.iteration.make_right(self._gradients)
        self._second = self._average(self.iteration.right, "right")
        return self.first.absent

    def finish(self) -> None:
        """Wait for the second reduction, and write the results over the gradients."""
        assert self._second is not None
        self._second.wait()
        size = size_of(self._how.process_set) if self._how.op == ReduceOp.SUM else 1
        self.iteration.finish(self._gradients, self._how.postscale * size)
        self._gradients, self.running = [], False

    def complete(self) -> None:
        """Wait for both reductions, and write the results over the gradients."""
        self.advance()
        self.finish()

    def _average(self, array: Array, side: str, absent: int = 0) -> Handle:
        label = f"{self._name}.{side}" if self._name else None
        finish_earlier("allreduce", label, self._how.process_set)
        name = wire_name("allreduce", label)
        return api.context().engine.allreduce(
            [array], ReduceOp.AVERAGE, name, process_set=number_of(self._how.process_set), absent=absent
        )


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
        self.power: Optional[PowerReduction] = None
        self.rows: Optional[List[slice]] = None

    def block(self, timeout_s: Optional[float]) -> bool:
        """Sleep until what was submitted has ended, or for so long each; whether it has."""
        first = None if self.power is None else self.power.first
        handles = self.handles if first is None else [*self.handles, first]
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
