"""The oldest version of Keras that works."""

from __future__ import annotations

import sys

import keras

OLDEST = 3


def check(version: str) -> None:
    """Raise ImportError if this version of Keras is too old."""
    if int(version.partition(".")[0]) < OLDEST:
        raise ImportError(
            f"ringcomm.keras and ringcomm.tensorflow.keras need Keras {OLDEST}, which comes with TensorFlow "
            f"2.16 and later; this is Keras {version}. Update it ({sys.executable} -m pip install -U "
            "tensorflow), or train with a GradientTape and ringcomm.tensorflow (horovod.tensorflow), which "
            "works with TensorFlow 2.12 to 2.15 too."
        )


check(keras.__version__)
