"""Broadcast the parameters of models from one rank to all."""

from __future__ import annotations

from typing import Any, List, Optional

import mxnet as mx
import numpy as np
from mxnet.gluon.parameter import DeferredInitializationError, Parameter, ParameterDict

from .. import api
from .._adapter.objects import LateBroadcasts, Presence, allgather_object, disagreement
from .._adapter.submit import start_broadcast
from ..calls.process_set import ProcessSet, global_process_set, number_of, size_of
from ..docstrings import documented
from ..errors import ConfigError
from .arrays import NDArrayOperand, dense, flat_array


@documented
def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> None:  # fmt: skip
    """Overwrite the parameters of a model on every rank with the root's.

    Example: ``hvd.broadcast_parameters(model.collect_params(), root_rank=0)``.

    A parameter whose initialization is deferred until its layer sees data is overwritten then; each rank may
    use its layers in another order. A parameter that is initialized once more by force is not sent again.

    Args:
        params: ``Block.collect_params()`` or a dict of NDArrays or parameters, like those of
            ``Module.get_params()``: the same names and dtypes on all ranks.
        {root_rank}
        prefix: appears in the names of the operations.
        {process_set}

    Raises:
        ConfigError: ``params`` is neither a dict nor a ParameterDict; or (on all ranks) names or dtypes
            differ between ranks, or a parameter is not initialized on one of them.
        ShapeError: (in the first forward pass) a parameter has another size than the root's.
        {call_errors}
    """
    if not isinstance(params, (dict, ParameterDict)):
        raise ConfigError(f"invalid params of type: {type(params).__name__}, not a dict or a ParameterDict")
    if prefix is not None and not isinstance(prefix, str):
        raise ConfigError(f"broadcast_parameters: prefix={prefix!r} is not a string.")
    if size_of(process_set) == 1:
        return
    found = [_Found(str(name), value) for name, value in sorted(params.items())]
    label = f"parameters.{prefix}" if prefix else "parameters"
    reports = allgather_object([item.presence() for item in found], label, process_set)
    members = api.context().engine.sets.members(number_of(process_set))
    problem = disagreement(members, reports)
    if problem is not None:
        raise ConfigError(f"broadcast_parameters: {problem}")
    late = {item.name for report in reports for item in report if not item.present}
    _broadcast_now([item for item in found if item.name not in late], root_rank, label, process_set)
    if late:
        _broadcast_late([item for item in found if item.name in late], root_rank, label, process_set)


class _Found:
    """One item of ``params``, with an NDArray for each context, or none if it is not initialized yet."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value
        self.problem = ""
        self.arrays: List[mx.nd.NDArray] = []
        try:
            arrays = value.list_data() if isinstance(value, Parameter) else [value]
            self.arrays = [dense(array, f"the broadcast of {name!r}") for array in arrays]
        except DeferredInitializationError:
            pass
        except (ConfigError, RuntimeError) as problem:
            self.problem = str(problem)

    def presence(self) -> Presence:
        dtype = np.dtype(self.value.dtype).name if not self.problem else ""
        return Presence(self.name, dtype, bool(self.arrays), self.problem)

    def copy_to_other_contexts(self) -> None:
        for other in self.arrays[1:]:
            other[:] = self.arrays[0].as_in_context(other.context)


def _broadcast_now(found: List[_Found], root_rank: int, label: str, process_set: ProcessSet) -> None:
    """Overwrite parameters that all ranks have, as one operation."""
    if not found:
        return
    operands = [NDArrayOperand(item.arrays[0]) for item in found]
    start_broadcast(operands, root_rank, label, process_set, True).wait()
    for item in found:
        item.copy_to_other_contexts()


def _broadcast_late(found: List[_Found], root_rank: int, label: str, process_set: ProcessSet) -> None:
    """Overwrite parameters that some ranks do not have yet, as soon as these are initialized."""
    late = LateBroadcasts([item.name for item in found], root_rank, label, process_set)
    for item in found:
        if not item.arrays:
            _when_initialized(item.value, late, item.name)
    # What the root does not have yet, the ranks that have it get when the root initializes it: they wait.
    for item in found:
        if item.arrays:
            _exchange(late, item)


def _exchange(late: LateBroadcasts, item: _Found) -> None:
    if late.is_root:
        late.send(item.name, flat_array(item.arrays[0]))
        return
    target = NDArrayOperand(item.arrays[0])
    late.receive(item.name, target.flat)
    target.finish()
    item.copy_to_other_contexts()


def _when_initialized(parameter: Parameter, late: LateBroadcasts, name: str) -> None:
    """Broadcast a parameter right after its deferred initialization, once."""
    initialize = parameter._init_impl

    def initialize_and_broadcast(data: Any, contexts: Any) -> None:
        parameter._init_impl = initialize
        initialize(data, contexts)
        _exchange(late, _Found(name, parameter))

    parameter._init_impl = initialize_and_broadcast
