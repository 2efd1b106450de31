"""The public names of a module, read from its source, so that no framework has to be installed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator, Set

ROOT = Path(__file__).resolve().parents[1]


def source_of(module: str) -> Path:
    """Return the file of a module of this repository; it may not exist."""
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def public_names(module: str) -> Set[str]:
    """Return the names in ``__all__`` of a module, including those of modules that it exports with
    ``ringcomm.docstrings.export``; LookupError without ``__all__``.
    """
    path = source_of(module)
    tree = ast.parse(path.read_text())
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            if isinstance(node.value, ast.Subscript):  # vars(MODULE)["__all__"], of a module imported with *
                return set(_starred(tree, package))
            return set(ast.literal_eval(node.value))
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "_export":
            return set(_exported(call, tree, package))
    raise LookupError(f"{module} has no __all__")


def _starred(tree: ast.Module, package: str) -> Iterator[str]:
    """Return what is imported with ``*``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield from public_names(_absolute(node, package))


def _exported(call: ast.Call, tree: ast.Module, package: str) -> Iterator[str]:
    """Return what is imported under its own name or with ``*``, and what the call names."""
    yield from _starred(tree, package)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:  # otherwise of modules
            for alias in node.names:
                if alias.asname == alias.name and not alias.name.startswith("_"):
                    yield alias.name
    yield from (item.value for item in call.args if isinstance(item, ast.Constant))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])
