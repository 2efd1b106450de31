"""Explanations of other packages' errors whose cause is known and not in the error. Pure."""

from __future__ import annotations

import re

_KERAS_2 = re.compile(
    r"keras\.optimizers\.legacy` is not supported in Keras 3"
    r"|'(?:Keras)?Variable' object has no attribute 'ref'"
    r"|Argument\(s\) not recognized: \{'(?:lr|decay)'"
    r"|Unrecognized keyword arguments passed to BatchNormalization: \{'fused'"
    r"|module '[\w.]*keras[\w.]*' has no attribute '[gs]et_session'"
    r"|cannot import name '[gs]et_session' from '[\w.]*keras"
    r"|\.variables\(\)[^\0]*TypeError: 'list' object is not callable"
    r"|compile\(\) got an unexpected keyword argument 'experimental_run_tf_function'"
)
_OTHERS = (
    (
        re.compile(
            r"module 'tensorflow' has no attribute '(?:ConfigProto|GPUOptions|Session|InteractiveSession|"
            r"placeholder|global_variables_initializer|get_variable|variable_scope|get_default_graph|reset_default_graph|"
            r"set_random_seed|app|flags|logging|layers|contrib)'"
        ),
        "This program was written for TensorFlow 1. Write `import tensorflow.compat.v1 as tf` and "
        "`tf.disable_v2_behavior()` in place of `import tensorflow as tf`; tf.contrib has no successor.",
    ),
    (
        re.compile(
            r"cannot import name 'HorovodStrategy'|strategies\.horovod'|invalid strategy name: .*horovod"
        ),
        "Lightning 2 has no HorovodStrategy. Write `import ringcomm.lightning` and "
        '`Trainer(strategy="ddp_ringcomm", accelerator="cpu")`.',
    ),
    (
        re.compile(r"[Uu]nknown c10d backend type '?RINGCOMM"),
        "Write `import ringcomm.torch.distributed` before init_process_group(): PyTorch finds the backend "
        "without it only from 2.5 on, and not with TORCH_DEVICE_BACKEND_AUTOLOAD=0.",
    ),
    (
        re.compile(
            r"marked as ready twice|mark a variable ready only once"
            r"|computed more than backward_passes_per_step"
        ),
        "If the model uses gradient checkpointing, pass use_reentrant=False to torch.utils.checkpoint "
        '(gradient_checkpointing_kwargs={"use_reentrant": False} in Transformers): the other form computes '
        "the gradients of a layer that is used twice in passes of their own.",
    ),
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
"""ringcomm's replacements for arguments of Horovod, torch.distributed and mpi4py."""


def hint_of(traceback: str) -> str:
    """Return a remedy for the error of a traceback, as a paragraph for the failure report, or ""."""
    if _KERAS_2.search(traceback):
        return (
            "This program was written for Keras 2, and tf.keras is Keras 3 here. Install tf_keras of "
            "TensorFlow's version on every host, and add -x TF_USE_LEGACY_KERAS=1 to the command."
        )
    for pattern, text in _OTHERS:
        if pattern.search(traceback):
            return text
    found = _KEYWORD.search(traceback)
    if found is not None and found[2] in _KEYWORDS:
        return f"ringcomm's {found[1]}() has no argument {found[2]!r}: {_KEYWORDS[found[2]]}."
    return ""
