"""Loads saved models with the version of Keras that ``tf.keras`` is."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import tensorflow as tf

from ..._adapter.compression import Compression
from ..._adapter.reduction import of_gradients
from ..._tensorflow.gradients import GradientReducer
from ..._tensorflow.legacy import make_distributed
from ...calls.process_set import global_process_set
from ...docstrings import documented
from ...keras import models
from ...keras.optimizer import is_keras_2
from ...ops import ReduceOp


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
    if not is_keras_2(tf.keras.Sequential()):
        return models.load_model(filepath, custom_optimizers, custom_objects, compression)
    model = models.load_by(tf.keras.models.load_model, filepath, custom_optimizers, custom_objects)
    if model.optimizer is not None:
        how = of_gradients(ReduceOp.AVERAGE, 1.0, global_process_set, compression)
        make_distributed(model.optimizer, GradientReducer(how), in_place=True)
    return model
