"""Compressed reductions on NumPy arrays, for every framework: of a model's gradients, or of single arrays.

Each gradient is sent as :func:`~.compression.codec_for` says. A :class:`CompressionState`, which belongs to a
model's first variable, keeps the compression error: gradient tapes and reducers come and go. Single arrays
have no such state, so there is no error feedback, and each is sent with the codec itself.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from .. import api
from ..arrays.bridge import flat_copy
from ..calls.process_set import number_of
from ..dtypes import Array
from ..engine.request import Handle
from ..errors import ConfigError
from ..ops import CODECS
from .choice import AutoCompression
from .compression import BLOCKWISE, Residuals, codec_for, reset_all
from .reduction import Reduction
from .submit import finish_earlier, run_all, wire_name

Shape = Tuple[int, ...]


def sent_as(compression: Any, dtype: str, shape: Sequence[int]) -> str:
    """Return the codec for a gradient, also if other reductions execute the compression as a conversion."""
    kind = getattr(compression, "kind", "")
    if kind in ("bf16", "fp16"):
        return str(kind) if dtype in ("float32", "float64") else "none"
    return codec_for(compression, dtype, shape)


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
    """Forget the residuals of variables' gradients, and log it in one line."""
    known = [variable for variable in variables if id(variable) in _states]
    reset_all([state_of(variable).residuals for variable in known], why)


def start_coded(
    how: Reduction, name: Optional[str], arrays: Sequence[Array], urgent: bool = False,
    weight: Optional[float] = None, state: Optional[CompressionState] = None, in_place: bool = False,
) -> Pending:  # fmt: skip
    """Start an allreduce: one operation to its callers, one engine operation for the arrays of each codec.

    ``how`` has one of ringcomm's compressors. Without a name it is matched by its order. ``urgent``: the
    caller waits for it next. ``state`` keeps gradients' residuals; None: the arrays are not gradients.
    ``in_place`` overwrites the arrays, which are contiguous. The result is a list of arrays.
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


def _codec(how: Reduction, compression: Any, is_gradient: bool, dtype: str, shape: Shape) -> str:
    if not how.adds:
        return "none"
    kind = str(getattr(compression, "kind", "none"))
    # The caller of a single reduction has chosen the codec for these arrays, whatever their shapes.
    return kind if not is_gradient and kind in CODECS else sent_as(compression, dtype, shape)


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
