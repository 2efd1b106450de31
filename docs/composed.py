"""For the API reference: docstrings with their shared parameter descriptions, as ``help()`` shows them.

Docstrings name other objects with roles (``:func:``) and end sentences in front of examples with two colons;
neither is Markdown, so both are replaced.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import griffe

_PATH = Path(__file__).resolve().parents[1] / "ringcomm" / "docstrings.py"
_SPEC = importlib.util.spec_from_file_location("ringcomm_docstrings", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):`(~?)([^`]+)`")
_EXAMPLE = re.compile(r"::(?=\n\s*\n)")


def as_markdown(text: str) -> str:
    """A docstring without roles and literal-block marks.

    Args:
        text: the docstring.

    Returns:
        The same with names as code: of ``~a.b`` only ``b``.
    """

    def name(found: re.Match[str]) -> str:
        target = found.group(2).lstrip(".")
        return f"`{target.rpartition('.')[2] if found.group(1) else target}`"

    return _EXAMPLE.sub(":", _ROLE.sub(name, text))


class ComposedDocstrings(griffe.Extension):
    """Replaces the placeholders and the roles in docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that was found."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(_MODULE.compose(obj.docstring.value))
