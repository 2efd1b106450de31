"""Files beside the user's script that are imported instead of a package or a module of Python."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Set

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
    names: Set[str] = {name for found in _MODULE.finditer(text) for name in found.groups() if name}
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
