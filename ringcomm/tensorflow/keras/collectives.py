"""The collectives on values, with results of TensorFlow's where operations run at once."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

from ...keras import collectives
from ...ops import ReduceOp
from ...process_set import ProcessSet, global_process_set


def allreduce(
    value: Any,
    name: Optional[str] = None,
    average: Optional[bool] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Optional[ReduceOp] = None,
    compression: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """See :func:`ringcomm.keras.allreduce`; a tensor, or in graphs of version 1 a NumPy array."""
    return _given_back(
        collectives.allreduce(
            value, name, average, prescale_factor, postscale_factor, op, compression, process_set
        )
    )


def allgather(value: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> Any:
    """See :func:`ringcomm.keras.allgather`; a tensor, or in graphs of version 1 a NumPy array."""
    return _given_back(collectives.allgather(value, name, process_set))


def broadcast(
    value: Any, root_rank: int, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """See :func:`ringcomm.keras.broadcast`; a tensor, or in graphs of version 1 a NumPy array."""
    return _given_back(collectives.broadcast(value, root_rank, name, process_set))


def reducescatter(
    value: Any,
    name: Optional[str] = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """See :func:`ringcomm.keras.reducescatter`; a tensor, or in graphs of version 1 a NumPy array."""
    return _given_back(collectives.reducescatter(value, name, op, process_set))


def _given_back(result: Any) -> Any:
    return tf.convert_to_tensor(result) if tf.executing_eagerly() else result
