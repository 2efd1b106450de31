"""For the API reference: docstrings with their shared parameter descriptions, as ``help()`` shows them.

Docstrings name other objects with roles (``:func:``) and end sentences in front of examples with two colons;
neither is Markdown, so both are replaced.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import griffe

_ROOT = Path(__file__).resolve().parents[1]


def _load(path: str) -> Any:
    """A module of the checkout that imports the standard library only."""
    spec = importlib.util.spec_from_file_location(f"docs_{Path(path).stem}", _ROOT / path)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # as dataclasses need it
    spec.loader.exec_module(module)
    return module


_MODULE, _OPTIONS = _load("ringcomm/docstrings.py"), _load("launcher/ringrun/plan/options.py")


def text_of_run() -> str:
    """The docstring of ``ringcomm.run``, a function of ringrun's."""
    tree = ast.parse((_ROOT / "launcher/ringrun/function.py").read_text())
    (run,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    text: str = _OPTIONS.with_options(ast.get_docstring(run), _OPTIONS.arguments_of_run())
    return text


_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):`(~?)([^`]+)`")
_EXAMPLE = re.compile(r"::(?=\n\s*\n)")
_ALONE = re.compile(r"^\s*::\n", re.MULTILINE)


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

    return _EXAMPLE.sub(":", _ALONE.sub("", _ROLE.sub(name, text)))


class ComposedDocstrings(griffe.Extension):
    """Replaces the placeholders and the roles in docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that was found."""
        if obj.path == "ringcomm.run":
            quiet = {"warnings": False}  # an attribute has no types of parameters
            obj.docstring = griffe.Docstring(text_of_run(), parent=obj, parser="google", parser_options=quiet)
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(_MODULE.compose(obj.docstring.value))
