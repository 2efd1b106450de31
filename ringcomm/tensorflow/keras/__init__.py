"""``ringcomm.keras`` for ``tf.keras``, under Horovod's module name ``horovod.tensorflow.keras``.

What differs: results are tensors in eager mode; loaded models are of ``tf.keras``.
"""

from __future__ import annotations

import sys
from functools import wraps
from inspect import signature
from typing import Any, Callable, Dict, Optional, Sequence

import tensorflow as tf

from ... import keras
from ..._adapter.compression import Compression as Compression
from ...docstrings import documented
from ...keras import *  # noqa: F403
from ...keras import callbacks as callbacks
from ...keras import elastic as elastic
from ...keras.optimizer import loaded

__all__ = vars(keras)["__all__"]
# Horovod's names of modules, which scripts import.
sys.modules.update({f"{__name__}.callbacks": callbacks, f"{__name__}.elastic": elastic})


def _with_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective with the signature and docstring of another one, which returns tensors."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not tf.executing_eagerly():
            return result
        return tf.nest.map_structure(tf.convert_to_tensor, result)

    call.__module__ = __name__
    call.__signature__ = signature(function).replace(return_annotation=Any)  # type: ignore[attr-defined]
    returned = "a tensor (in eager mode) or NumPy array"
    call.__doc__ = (function.__doc__ or "").replace("a new NumPy array", returned)
    return call


allreduce = _with_tensors(keras.allreduce)
alltoall = _with_tensors(keras.alltoall)
allgather = _with_tensors(keras.allgather)
broadcast = _with_tensors(keras.broadcast)
reducescatter = _with_tensors(keras.reducescatter)


@documented  # type: ignore[no-redef]
def load_model(
    filepath: Any, custom_optimizers: Optional[Sequence[type]] = None,
    custom_objects: Optional[Dict[str, Any]] = None, compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:  # fmt: skip
    """Load a saved model by ``tf.keras.models.load_model`` and make its optimizer distributed.

    Args:
        {keras_load}

    Returns:
        the model. Its optimizer, with its saved state, reduces gradients over all ranks.
    """
    return loaded(tf.keras.models.load_model, filepath, custom_optimizers, custom_objects, compression)
