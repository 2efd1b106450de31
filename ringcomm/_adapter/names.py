"""Names of variables by which the ranks match operations."""

from __future__ import annotations

import re
from typing import Any, Sequence

from .gradients import bucket_name

_COUNTED = re.compile(r"_\d+(?=/|$)")


def variable_name(variable: Any) -> str:
    """Return a variable's name without the numbers that frameworks append to make names unique.

    On a rank that has created another model before, those numbers differ from the other ranks'.
    """
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    return _COUNTED.sub("", str(name).replace(":0", ""))


def group_name(variables: Sequence[Any], scope: str) -> str:
    """Return the name of one operation on the gradients of all given variables."""
    names = [variable_name(variable) for variable in variables]
    shapes = [tuple(-1 if length is None else int(length) for length in item.shape) for item in variables]
    return f"{scope}/{bucket_name(names, shapes)}"
