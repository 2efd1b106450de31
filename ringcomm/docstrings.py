"""Parameter descriptions that many public functions share, written once and put into their docstrings.

A docstring may hold lines like ``{name}`` below ``Args:``. :func:`documented` replaces each by the text in
:data:`SHARED`, so that ``help()`` shows the whole description; the API reference does the same.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Callable, Dict, List, TypeVar

Documented = TypeVar("Documented", bound=Callable[..., Any])

SHARED: Dict[str, str] = {
    "name": """name: of the operation; the operations of all ranks with the same name belong together.
    None: operations are matched by the order of the calls.""",
    "process_set": """process_set: the ranks that take part; by default all ranks of the job.""",
    "op": """op: Average (the default), Sum, Min, Max, Product or Adasum.""",
    "prescale_factor": """prescale_factor: multiplies every rank's contribution before the reduction.""",
    "postscale_factor": """postscale_factor: multiplies the result after the reduction.""",
    "root_rank": """root_rank: the rank (of the job, not of the process set) whose data all ranks
    receive.""",
    "compression": """compression: ``Compression.none``, ``Compression.fp16`` or ``Compression.bf16``;
    float32 and float64 are sent as that type and converted back.""",
    # TensorFlow and Keras
    "tf_name": """name: of the operation; the operations of all ranks with the same name belong
    together. None: in a graph or ``tf.function`` the place in the graph determines the name; in eager
    mode operations are matched by the order of the calls.""",
    "tf_average": """average: deprecated form of ``op``: True is Average, False is Sum.""",
    "tf_device_dense": """device_dense: no effect; accepted because Horovod's function has it.""",
    "tf_device_sparse": """device_sparse: no effect; accepted because Horovod's function has it.""",
    "tf_ignore_name_scope": """ignore_name_scope: no effect; accepted because Horovod's function has it.""",
    "tf_sparse_as_dense": """sparse_as_dense: convert ``tf.IndexedSlices`` to dense tensors before they
    are reduced; otherwise the slices of all ranks are gathered.""",
    "tf_gradient_op": """op: Average (the default), Sum or Adasum.""",
    "tf_gradient_predivide_factor": """gradient_predivide_factor: with Average, divide by this factor
    before the sum and by (number of ranks / factor) after it, so that float16 sums stay in range.""",
    "tf_num_groups": """num_groups: split the gradients into this number of groups, each reduced as one
    operation; 0: one group.""",
    "tf_groups": """groups: the number of groups, or a list of lists of variables that are reduced
    together.""",
    "tf_scale_local_gradients": """scale_local_gradients: divide the gradients of local (not reduced)
    variables by the number of ranks.""",
    "tf_backward_passes_per_step": """backward_passes_per_step: number of batches of which gradients are
    summed locally before one reduction and one step.""",
    "tf_average_aggregated_gradients": """average_aggregated_gradients: divide the local sums by
    ``backward_passes_per_step``.""",
    "keras_compression": """compression: no effect; accepted because Horovod's function has it.""",
    "keras_filepath": """filepath: path of the saved model.""",
    "keras_custom_optimizers": """custom_optimizers: the user's optimizer classes that the file
    names.""",
    "keras_custom_objects": """custom_objects: other classes and functions that the file names, by name.""",
    "keras_legacy_opts": """legacy_opts: no effect; accepted because Horovod's function has it.""",
    "keras_steps_per_epoch": """steps_per_epoch: number of batches per epoch; None: the number that Keras
    reports.""",
    "keras_epoch": """epoch: index of the epoch, from 0.""",
    "keras_batch": """batch: index of the batch in the epoch, from 0.""",
    "keras_logs": """logs: metrics by name.""",
}
"""By placeholder: the lines that replace it, as below ``Args:`` (continuation lines indented by 4)."""

_PLACEHOLDER = re.compile(r"^([ \t]*)\{(\w+)\}[ \t]*$", re.MULTILINE)


def compose(text: str) -> str:
    """A docstring with its placeholders replaced.

    Raises:
        KeyError: a placeholder is not in :data:`SHARED`.

    >>> SHARED["example"] = "example: one line,\\n    and another."
    >>> print(compose("Args:\\n    {example}"))
    Args:
        example: one line,
            and another.
    >>> del SHARED["example"]
    """

    def shared(found: re.Match[str]) -> str:
        indent, name = found.groups()
        return "\n".join(indent + line for line in SHARED[name].split("\n"))

    return _PLACEHOLDER.sub(shared, text)


def documented(function: Documented) -> Documented:
    """Decorator for a function or a class: composes its docstring, and those of a class's methods."""
    parts: List[Any] = [function]
    if isinstance(function, type):
        parts += [item for item in vars(function).values() if inspect.isfunction(item)]
    for part in parts:
        if part.__doc__:
            part.__doc__ = compose(part.__doc__)
    return function
