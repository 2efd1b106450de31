"""Load saved models with distributed optimizers."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence

import keras

from .._adapter.compression import Compression
from .._adapter.reduction import of_gradients
from ..calls.process_set import global_process_set
from ..docstrings import documented
from ..ops import ReduceOp
from .optimizer import is_keras_2, make_distributed, make_for_keras_2


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
    return loaded(keras.models.load_model, filepath, custom_optimizers, custom_objects, compression)


def loaded(
    load: Callable[..., Any], filepath: Any, custom_optimizers: Optional[Sequence[type]],
    custom_objects: Optional[Dict[str, Any]], compression: Any,
) -> Any:  # fmt: skip
    """Load a model by the given function of Keras 2 or 3, as :func:`load_model` does."""
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = load(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        how = of_gradients(ReduceOp.AVERAGE, 1.0, global_process_set, compression)
        make = make_for_keras_2 if is_keras_2(optimizer) else make_distributed
        make(optimizer, how, in_place=True)
    return model
