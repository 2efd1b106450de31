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
_KEYWORD = re.compile(
    r"TypeError: (?:\w+\.)*((?:grouped_)?all(?:reduce|gather|toall)\w*|reducescatter\w*|broadcast\w*|barrier)"
    r"\(\) got an unexpected keyword argument '(\w+)'"
)
_SETS = (
    "process_set=rc.add_process_set([ranks]) of the functions that match by name, like "
    "allreduce_async(array, name=...)"
)
_KEYWORDS = {
    "async_op": "allreduce_async() and the like return a handle, and handle.wait() the result",
    "average": "op=rc.Average, which is the default, and op=rc.Sum select the reduction",
    "group": f"a group of ranks is {_SETS}",
    "process_set": f"it is {_SETS}",
    "root": "it is called root_rank",
    "src": "it is called root_rank",
}
"""By arguments of Horovod, torch.distributed and mpi4py, what ringcomm has instead."""


def hint_of(traceback: str) -> str:
    """Return what helps against the error of a traceback: a paragraph for the failure report, or ""."""
    if _KERAS_2.search(traceback):
        return (
            "This program was written for Keras 2, and tf.keras is Keras 3 here. Install tf_keras of "
            "TensorFlow's version on every host, and add -x TF_USE_LEGACY_KERAS=1 to the command."
        )
    found = _KEYWORD.search(traceback)
    if found is not None and found[2] in _KEYWORDS:
        return f"ringcomm's {found[1]}() has no argument {found[2]!r}: {_KEYWORDS[found[2]]}."
    return ""
