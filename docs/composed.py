"""For the API reference: docstrings with their shared parameter descriptions, as ``help()`` shows them.

Docstrings name other objects with roles (``:func:``) and end sentences in front of examples with two colons;
neither is Markdown, so both are replaced.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import griffe

from tests.public_names import public_names

_ROOT = Path(__file__).resolve().parents[1]


def _load(path: str) -> Any:
    """A module of the checkout that imports the standard library only."""
    spec = importlib.util.spec_from_file_location(f"docs_{Path(path).stem}", _ROOT / path)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # as dataclasses need it
    spec.loader.exec_module(module)
    return module


def _load_options() -> Any:
    """The table of the collectives' options, without what else its package imports."""
    for name, folder in (("docs_ringcomm", "ringcomm"), ("docs_ringcomm.collective", "ringcomm/collective")):
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(_ROOT / folder)]
    return importlib.import_module("docs_ringcomm.collective.options")


_MODULE, _OPTIONS = _load("ringcomm/docstrings.py"), _load("launcher/ringrun/plan/options.py")
_COLLECTIVES = _load_options()


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


def _value_of(argument: ast.expr) -> str:
    """An argument of ``takes()``: a text, or the name of one in its module."""
    value: str = (
        getattr(_COLLECTIVES, argument.id) if isinstance(argument, ast.Name) else ast.literal_eval(argument)
    )
    return value


def show_options(obj: griffe.Function) -> None:
    """Give a function that ``takes()`` options their parameters and descriptions, as ``help()`` has them."""
    for decorator in obj.decorators:
        call = ast.parse(str(decorator.value), mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "takes":
            continue
        given = [_value_of(argument) for argument in call.args]
        given += [""] * (4 - len(given))
        named = {item.arg: _value_of(item.value) for item in call.keywords}
        kind, order = given[:2]
        texts, without = named.get("texts", given[2]), named.get("without", given[3])
        names = _COLLECTIVES.names_of(kind, order, without)
        leading = list(obj.parameters)[:-1]
        added = [
            griffe.Parameter(
                item.name, annotation=item.annotation, kind=griffe.ParameterKind.positional_or_keyword,
                default=re.sub(r"<(.*): \d+>", r"\1", repr(item.default)),
            )
            for item in _COLLECTIVES.parameters_of(names)
        ]  # fmt: skip
        obj.parameters = griffe.Parameters(*leading, *added)
        if obj.docstring is not None:
            obj.docstring.value = _COLLECTIVES.compose_options(obj.docstring.value, kind, names, texts)


class ComposedDocstrings(griffe.Extension):
    """Replaces the placeholders and the roles in docstrings, and shows what packages export again."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Called for every module: its ``__all__`` may be made by :mod:`ringcomm.calls.exports`."""
        with suppress(LookupError):
            mod.exports = list(public_names(mod.path))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that was found."""
        if obj.path == "ringcomm.run":
            quiet = {"warnings": False}  # an attribute has no types of parameters
            obj.docstring = griffe.Docstring(text_of_run(), parent=obj, parser="google", parser_options=quiet)
        if isinstance(obj, griffe.Function):
            show_options(obj)
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(_MODULE.compose(obj.docstring.value))
