"""Compressed reductions of a model's gradients on NumPy arrays, with error feedback: for every framework.

Each gradient is sent as :func:`~.compression.codec_for` says. What compression loses is kept by a
:class:`CompressionState`, which belongs to a model's first variable: gradient tapes and reducers come and go.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .. import api
from ..arrays.bridge import flat_copy
from ..dtypes import Array
from ..engine.request import Handle
from ..ops import ReduceOp
from ..process_set import number_of, size_of
from .arguments import wire_name
from .choice import AutoCompression
from .compression import PowerSGD, codec_for
from .feedback import Residuals
from .gradients import Reduction
from .powersgd import Matrix, PowerIteration
from .waiting import run_all

Shape = Tuple[int, ...]


def is_coded(compression: Any) -> bool:
    """Whether the reduction executes the compression itself."""
    return getattr(compression, "kind", "") in ("int8", "int4", "powersgd", "auto")


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


class CompressedAllreduce(NamedTuple):
    """Reduces ``inputs`` gradients as one operation, to callers; each codec's are one of the engine's.

    Attributes:
        how: the reduction.
        name: of the operation.
        inputs: how many.
        compression: a compressor for which :func:`is_coded` holds.
        state: what is kept from step to step.
    """

    how: Reduction
    name: Optional[str]
    inputs: int
    compression: Any
    state: CompressionState

    def start(self, arrays: Sequence[Array], urgent: bool = False) -> Pending:
        """Submit it; the result is a list of new arrays."""
        pairs = [flat_copy(array) for array in arrays]
        adds = self.how.op in (ReduceOp.AVERAGE, ReduceOp.SUM)
        auto = self.state.auto(self.compression)
        compression = self.compression if auto is None else auto.chosen
        groups: Dict[str, List[int]] = {}
        for index, (flat, shape) in enumerate(pairs):
            codec = sent_as(compression, flat.dtype.name, shape) if adds else "none"
            groups.setdefault(codec, []).append(index)
        pending = Pending([flat.reshape(shape) for flat, shape in pairs], auto)
        if auto is not None:
            auto.submitting()
        for codec in sorted(groups):
            flats = [pairs[index][0] for index in groups[codec]]
            shapes = [pairs[index][1] for index in groups[codec]]
            keys = [f"{self.name}/{index}" for index in groups[codec]]
            if codec == "powersgd":
                pending.power = _Power(self, keys, flats, shapes)
            else:
                pending.handles.append(self._submit(codec, keys, flats, shapes, urgent))
        return pending

    def _submit(
        self, codec: str, keys: Sequence[str], flats: Sequence[Array], shapes: Sequence[Shape], urgent: bool
    ) -> Handle:
        residuals = self.state.residuals
        kept = [residuals.of(key, flat.size) for key, flat in zip(keys, flats)] if codec[:3] == "int" else []
        return api.context().engine.allreduce(
            flats, self.how.op, wire_name("allreduce", f"{self.name}.{codec}"), shapes, self.how.prescale,
            self.how.postscale, number_of(self.how.process_set), urgent, compression=codec, residuals=kept,
            weight=self.how.weight_now(),
        )  # fmt: skip


class _Power:
    """The two reductions of PowerSGD: :meth:`start` has submitted the first."""

    def __init__(
        self, operation: CompressedAllreduce, keys: Sequence[str], flats: List[Array], shapes: Sequence[Shape]
    ) -> None:
        self._how, self._name, self._flats = operation.how, operation.name, flats
        compression: PowerSGD = operation.compression
        matrices = [
            Matrix(key, shape[0], flat.size // shape[0]) for key, flat, shape in zip(keys, flats, shapes)
        ]
        self._iteration = operation.state.iteration(matrices, compression.rank)
        if self._how.prescale != 1.0:
            for flat in flats:
                np.multiply(flat, np.float32(self._how.prescale), out=flat)
        self._iteration.add_residuals(flats)
        self._iteration.make_left(flats)
        self.first = self._average(self._iteration.left, "left")

    def _average(self, array: Array, side: str) -> Handle:
        name = wire_name("allreduce", f"{self._name}.powersgd.{side}")
        return api.context().engine.allreduce(
            [array], ReduceOp.AVERAGE, name, process_set=number_of(self._how.process_set)
        )

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
    """

    def __init__(self, results: List[Array], auto: Optional[AutoCompression] = None) -> None:
        self._results = results
        self._auto = auto
        self.handles: List[Handle] = []
        self.power: Optional[_Power] = None

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
        return self._results
