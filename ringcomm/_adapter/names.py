"""Names of variables by which the ranks match operations."""

from __future__ import annotations

import re
import zlib
from typing import Any, Sequence

from .gradients import bucket_name

_LISTED = 3

_COUNTED = re.compile(r"_\d+(?=/|$)")


def variable_name(variable: Any) -> str:
    """Return a variable's name without the numbers that frameworks append to make names unique.

    On a rank that has created another model before, those numbers differ from the other ranks'.
    """
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    return _COUNTED.sub("", str(name).replace(":0", ""))


def without(names: Sequence[str]) -> str:
    """Return the end of the name of an operation on gradients in a step without those of these variables.

    >>> without(["b", "w"])
    ', without b, w'
    """
    if len(names) <= _LISTED:
        return f", without {', '.join(names)}" if names else ""
    checksum = zlib.crc32(repr(names).encode())
    return f", without {', '.join(names[:_LISTED])} and {len(names) - _LISTED} more ({checksum:08x})"


def group_name(variables: Sequence[Any], scope: str, absent: Sequence[Any] = ()) -> str:
    """Return the name of one operation on the gradients of all given variables; ``absent`` have none."""
    lacking = without([variable_name(variable) for variable in absent])
    if not variables:
        return f"{scope}/nothing{lacking}"
    names = [variable_name(variable) for variable in variables]
    shapes = [tuple(-1 if length is None else int(length) for length in item.shape) for item in variables]
    return f"{scope}/{bucket_name(names, shapes)}{lacking}"
