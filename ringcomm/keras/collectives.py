"""The collectives on values: whatever a Keras backend or NumPy calls an array, outside of graphs."""

from __future__ import annotations

from typing import Any, Iterable, Optional

import keras
import numpy as np

from .. import api
from .._adapter import graph_callbacks
from .._adapter.arguments import reduction
from .._adapter.gradients import Reduction
from ..ops import ReduceOp, op_of
from ..process_set import ProcessSet, global_process_set


def allreduce(
    value: Any,
    name: Optional[str] = None,
    average: Optional[bool] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Optional[ReduceOp] = None,
    compression: Any = None,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray[Any, Any]:
    """Reduce a value of the same shape and type from every rank; every rank gets the result.

    Args:
        op: Average (the default), Sum, Min, Max, Product or Adasum; ``average`` is its deprecated form.
        compression: without effect; Horovod has it.
    """
    how = Reduction(reduction(op, average), prescale_factor, postscale_factor, process_set)
    return _run(graph_callbacks.Allreduce(how, name), value)


def reducescatter(
    value: Any,
    name: Optional[str] = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray[Any, Any]:
    """Reduce a value of which every rank gets its rows only: the first ranks one more if uneven."""
    return _run(graph_callbacks.Reducescatter(Reduction(op_of(op), 1.0, 1.0, process_set), name), value)


def allgather(
    value: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Collect every rank's rows, in rank order; how many there are may differ from rank to rank."""
    return _run(graph_callbacks.Allgather(process_set, name), value)


def broadcast(
    value: Any, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """The root's value, on every rank."""
    return _run(graph_callbacks.Broadcast(root_rank, process_set, name), value)


def _run(operation: graph_callbacks.Operation, value: Any) -> np.ndarray[Any, Any]:
    (result,) = graph_callbacks.Batch([operation]).run([as_array(value)])
    return result


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """What a Keras backend, TensorFlow or NumPy calls an array, as NumPy's."""
    if keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        value = keras.ops.convert_to_numpy(value)
    return np.asarray(value)


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give Keras variables the root's values, all in one operation."""
    listed = list(variables)
    if not listed or process_set.size() == 1:
        return
    operation = graph_callbacks.Broadcast(root_rank, process_set, None, len(listed))
    results = graph_callbacks.Batch([operation]).run([as_array(variable) for variable in listed])
    if api.rank() != root_rank:
        for variable, result in zip(listed, results):
            variable.assign(result)
