"""Models from files, by whatever Keras ``tf.keras`` is."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import tensorflow as tf

from ..._adapter.compression import Compression
from ..._tensorflow.gradients import GradientReducer
from ..._tensorflow.legacy import make_distributed
from ...keras import models
from ...keras.optimizer import is_keras_2


def load_model(
    filepath: Any, custom_optimizers: Optional[Sequence[type]] = None,
    custom_objects: Optional[Dict[str, Any]] = None, compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:  # fmt: skip
    """Load a model as ``tf.keras.models.load_model`` does; see :func:`ringcomm.keras.load_model`."""
    if not is_keras_2(tf.keras.Sequential()):
        return models.load_model(filepath, custom_optimizers, custom_objects, compression)
    model = models.load_by(tf.keras.models.load_model, filepath, custom_optimizers, custom_objects)
    if model.optimizer is not None:
        make_distributed(model.optimizer, GradientReducer(compression), in_place=True)
    return model
