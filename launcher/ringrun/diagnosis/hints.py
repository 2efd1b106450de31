"""Remedies for errors of programs whose cause is known and not in the error: errors of other packages, files
of this machine that a host lacks, and files that have the name of a module.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from pathlib import Path
from typing import Sequence

from ..plan.job import HostJob
from .tracebacks import traceback_lines

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
def hint_of(traceback: str) -> str:
    """Return a remedy for the error of a traceback, as a paragraph for the failure report, or ""."""
    if _KERAS_2.search(traceback):
        return (
            "This program was written for Keras 2, and tf.keras is Keras 3 here. Install tf_keras of "
            "TensorFlow's version on every host, and add -x TF_USE_LEGACY_KERAS=1 to the command."
        )
    return next((text for pattern, text in _OTHERS if pattern.search(traceback)), "")


# -- files of this machine --------------------------------------------------------------------

_MISSING = re.compile(
    r"no such file|not ?found|does ?n[o']t exist|errno = 2\b|(can|could) ?n[o']t (find|open)|unable to open",
    re.I,
)
_NAME = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|([^\s'\"`:;,()\[\]]*[/.][^\s'\"`:;,()\[\]]+)")
"""What may be a path in an error."""


def local_file_hint(host: HostJob, lines: Sequence[str]) -> str:
    """Return a paragraph if a rank failed because its host lacks a file of this machine, or ""."""
    found = traceback_lines(lines)[1:] or lines[-5:]
    error = "\n".join(line for line in found if not line.startswith("  "))
    if host.is_local or not _MISSING.search(error):
        return ""
    names = (next(filter(None, groups)).rstrip(".") for groups in _NAME.findall(error))
    path = next((os.path.abspath(name) for name in names if os.path.exists(name)), "")  # noqa: PTH100, PTH110
    if not path:
        return ""
    target = f"{host.planned.spec.target}:{os.path.dirname(path)}/"  # noqa: PTH120
    return (
        f"{path} is on this machine, but not on {host.name}: each rank reads the files of its own host. Copy "
        f"it there (`rsync -a {shlex.quote(path)} {shlex.quote(target)}`), send the directory of the program "
        "along with --ship, or use a directory that all hosts share. What rank 0 has written in this job, "
        "rank 0 can read and broadcast."
    )


# -- names of modules -------------------------------------------------------------------------

_MODULE = re.compile(
    r"module '(?P<a>\w+)[.\w]*' has no attribute"
    r"|'(?P<b>\w+)' is not a package"
    r"|cannot import name '\w+' from (?:partially initialized module )?'(?P<c>\w+)"
)
"""Errors caused by another module of the same name."""


def shadow_hint(text: str, folder: Path) -> str:
    """Return a paragraph if an error with its traceback comes from a file named like another module, or "";
    `folder` is the script's, where Python looks for modules first.
    """
    names = {name for found in _MODULE.finditer(text) for name in found.groups() if name}
    for name in sorted(names):
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            if path.is_file() and _is_elsewhere(name, path):
                shown = (path if path.stem == name else path.parent).absolute()
                return (
                    f"{shown} has the name of the module {name}, and is imported instead of it, because it "
                    "is beside the script. Rename it."
                )
    return ""


def _is_elsewhere(name: str, path: Path) -> bool:
    """Return whether there is another module of that name."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return found is not None and (found.origin is None or Path(found.origin).resolve() != path.resolve())
