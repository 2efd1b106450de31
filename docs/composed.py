"""For the API reference: docstrings with their shared parameter descriptions, as ``help()`` shows them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import griffe

_PATH = Path(__file__).resolve().parents[1] / "ringcomm" / "docstrings.py"
_SPEC = importlib.util.spec_from_file_location("ringcomm_docstrings", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)


class ComposedDocstrings(griffe.Extension):
    """Replaces the placeholders in docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that was found."""
        if obj.docstring is not None:
            obj.docstring.value = _MODULE.compose(obj.docstring.value)
