"""Loads saved models with distributed optimizers."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence

import keras

from .._adapter.compression import Compression
from .._adapter.reduction import of_gradients
from ..calls.process_set import global_process_set
from ..docstrings import documented
from ..ops import ReduceOp
from .optimizer import make_distributed


@documented
def load_model(
    filepath: Any,
    custom_optimizers: Optional[Sequence[type]] = None,
    custom_objects: Optional[Dict[str, Any]] = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model by ``keras.models.load_model`` and make its optimizer distributed.

    Args:
        {keras_load}

    Returns:
        the model. Its optimizer, with its saved state, reduces gradients over all ranks.
    """
    model = load_by(keras.models.load_model, filepath, custom_optimizers, custom_objects)
    if getattr(model, "optimizer", None) is not None:
        how = of_gradients(ReduceOp.AVERAGE, 1.0, global_process_set, compression)
        make_distributed(model.optimizer, how, in_place=True)
    return model


def load_by(
    load: Callable[..., Any],
    filepath: Any,
    custom_optimizers: Optional[Sequence[type]],
    custom_objects: Optional[Dict[str, Any]],
) -> Any:
    """Load a model by the given function of Keras, passing it the user's classes."""
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    return load(filepath, custom_objects={**known, **(custom_objects or {})})
