"""What variables are called among the ranks."""

from __future__ import annotations

import re
from typing import Any, Sequence

from .gradients import bucket_name

_COUNTED = re.compile(r"_\d+(?=/|$)")


def variable_name(variable: Any) -> str:
    """What a variable is called, without the numbers that frameworks append to names in use already.

    A rank that has made another model before has other numbers than the rest.
    """
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    return _COUNTED.sub("", str(name).replace(":0", ""))


def group_name(variables: Sequence[Any], scope: str) -> str:
    """What an operation on the gradients of all of these variables is called."""
    names = [variable_name(variable) for variable in variables]
    shapes = [tuple(-1 if length is None else int(length) for length in item.shape) for item in variables]
    return f"{scope}/{bucket_name(names, shapes)}"
