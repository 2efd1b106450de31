"""Models from files."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence

import keras

from .._adapter.compression import Compression
from .._adapter.gradients import Reduction
from ..ops import ReduceOp
from ..process_set import global_process_set
from .optimizer import make_distributed
from .reduction_options import How


def load_model(
    filepath: Any,
    custom_optimizers: Optional[Sequence[type]] = None,
    custom_objects: Optional[Dict[str, Any]] = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model as ``keras.models.load_model`` does; its optimizer, with its state, is distributed then.

    Args:
        custom_optimizers: optimizer classes of your own that the file may name.
        custom_objects: other classes and functions, by name.
        compression: how gradients travel.
        legacy_opts: without effect; Horovod has it.
    """
    model = load_by(keras.models.load_model, filepath, custom_optimizers, custom_objects)
    if getattr(model, "optimizer", None) is not None:
        how = How(Reduction(ReduceOp.AVERAGE, 1.0, 1.0, global_process_set), compression, False, None)
        make_distributed(model.optimizer, how, in_place=True)
    return model


def load_by(
    load: Callable[..., Any],
    filepath: Any,
    custom_optimizers: Optional[Sequence[type]],
    custom_objects: Optional[Dict[str, Any]],
) -> Any:
    """Load a model by some Keras's own function, which is told the user's classes."""
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    return load(filepath, custom_objects={**known, **(custom_objects or {})})
