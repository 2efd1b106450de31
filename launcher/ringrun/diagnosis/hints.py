"""What errors of other packages mean, where the cause is known and the error does not say it. Pure."""

from __future__ import annotations

import re

_KERAS_2 = re.compile(
    r"keras\.optimizers\.legacy` is not supported in Keras 3"
    r"|'(?:Keras)?Variable' object has no attribute 'ref'"
    r"|Argument\(s\) not recognized: \{'(?:lr|decay)'"
    r"|Unrecognized keyword arguments passed to BatchNormalization: \{'fused'"
    r"|module 'keras\._tf_keras\.keras\.backend' has no attribute 'get_session'"
    r"|compile\(\) got an unexpected keyword argument 'experimental_run_tf_function'"
)


def hint_of(traceback: str) -> str:
    """What helps against the error of a traceback: a paragraph for the failure report, or ""."""
    if _KERAS_2.search(traceback):
        return (
            "This program was written for Keras 2, and tf.keras is Keras 3 here. Install tf_keras of "
            "TensorFlow's version on every host, and add -x TF_USE_LEGACY_KERAS=1 to the command."
        )
    return ""
