"""The collectives of :mod:`ringcomm.keras`, with TensorFlow tensors as results in eager mode."""

from __future__ import annotations

from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Callable

import tensorflow as tf

from ...keras import collectives

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P")


def _with_tensors(function: Callable[P, Any]) -> Callable[P, Any]:
    """Return a collective with the signature and docstring of another one, which returns tensors."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        result = function(*args, **kwargs)
        if not tf.executing_eagerly():
            return result
        return tf.nest.map_structure(tf.convert_to_tensor, result)

    call.__module__ = __name__
    call.__signature__ = signature(function).replace(return_annotation=Any)  # type: ignore[attr-defined]
    returned = "a tensor (in eager mode) or NumPy array"
    call.__doc__ = (function.__doc__ or "").replace("a new NumPy array", returned)
    return call


allreduce = _with_tensors(collectives.allreduce)
alltoall = _with_tensors(collectives.alltoall)
allgather = _with_tensors(collectives.allgather)
broadcast = _with_tensors(collectives.broadcast)
reducescatter = _with_tensors(collectives.reducescatter)
