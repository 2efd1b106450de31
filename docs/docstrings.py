"""A griffe extension: the API reference shows the docstrings and signatures that ``help()`` shows.

ringcomm puts shared descriptions into docstrings, and options into the signatures of collectives, when it is
imported. The reference is made from the sources, so that no framework has to be installed.
"""

from __future__ import annotations

import ast
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launcher")]

from ringcomm.collective import options  # noqa: E402 - of this checkout
from ringcomm.docstrings import compose  # noqa: E402
from ringrun.plan.options import arguments_of_run, with_options  # noqa: E402
from tests.public_names import public_names  # noqa: E402

FIRST = ["init", "rank", "size", "DistributedOptimizer", "broadcast_parameters", "run"]
"""The names with which the page of a package begins: the order in which programs use them."""
ROLE = re.compile(r":\w+:`(~?)\.*([^`]+)`")
LITERAL_BLOCK = re.compile(r"^\s*::\n|:(?=:\n\s*\n)", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Replace roles by names as code, and drop the marks of literal blocks."""

    def name(found: re.Match[str]) -> str:
        return f"`{found[2].rpartition('.')[2] if found[1] else found[2]}`"

    return LITERAL_BLOCK.sub("", ROLE.sub(name, text))


def add_options(function: griffe.Function, call: ast.Call) -> None:
    """Give a function the parameters and texts of its decorator ``takes(kind, order, texts, without)``."""

    def value(node: ast.expr) -> str:
        if not isinstance(node, ast.Name):
            return str(ast.literal_eval(node))
        if hasattr(options, node.id):
            return str(getattr(options, node.id))
        return str(ast.literal_eval(str(function.module[node.id].value)))  # a constant of the same module

    given = dict(zip(("kind", "order", "texts", "without"), map(value, call.args)))
    given.update({str(item.arg): value(item.value) for item in call.keywords})
    names = options.names_of(given["kind"], given.get("order", ""), given.get("without", ""))
    added = [
        griffe.Parameter(
            item.name, annotation=item.annotation, kind=griffe.ParameterKind.positional_or_keyword,
            default=re.sub(r"<(.*): \d+>", r"\1", repr(item.default)),
        )
        for item in options.parameters_of(names)
    ]  # fmt: skip
    function.parameters = griffe.Parameters(*list(function.parameters)[:-1], *added)
    if function.docstring is not None:
        text = function.docstring.value
        function.docstring.value = options.compose_options(text, given["kind"], names, given.get("texts", ""))


class Docstrings(griffe.Extension):
    """Composes docstrings and signatures, and shows what packages export."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Set ``__all__``, which ``ringcomm.docstrings.export`` computes."""
        with suppress(LookupError):
            names = sorted(public_names(mod.path), key=str.lower)
            mod.exports = sorted(names, key=lambda each: FIRST.index(each) if each in FIRST else len(FIRST))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Compose the docstring of an object, and the signature of a function that takes options."""
        if obj.path == "ringcomm.run":  # a function of the launcher, imported when it is used
            module = ast.parse((ROOT / "launcher" / "ringrun" / "function.py").read_text())
            functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
            (run,) = (each for each in functions if each.name == "run")
            text = with_options(ast.get_docstring(run), arguments_of_run())
            obj.docstring = griffe.Docstring(text, parent=obj, parser="google")
        if isinstance(obj, griffe.Function):
            for decorator in obj.decorators:
                call = ast.parse(str(decorator.value), mode="eval").body
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "takes":
                    add_options(obj, call)
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(compose(obj.docstring.value))
