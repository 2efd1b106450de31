"""Load saved models with the version of Keras that ``tf.keras`` is."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import tensorflow as tf

from ..._adapter.compression import Compression
from ...docstrings import documented
from ...keras import models


@documented
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
    return models.loaded(
        tf.keras.models.load_model, filepath, custom_optimizers, custom_objects, compression
    )
