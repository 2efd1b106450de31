"""The public names of a module, read from its source, so that no framework has to be installed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator, Set

ROOT = Path(__file__).resolve().parents[1]


def source_of(module: str) -> Path:
    """The file of a module of this repository.

    Args:
        module: its name, like ``ringcomm.torch``.

    Returns:
        The path of its file; it may not exist.
    """
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def public_names(module: str) -> Set[str]:
    """The names in ``__all__`` of a module.

    Args:
        module: its name, like ``ringcomm.torch``.

    Returns:
        The names, with those that come from the ``__all__`` of modules that it imports.

    Raises:
        LookupError: the module has no ``__all__``.
    """
    path = source_of(module)
    tree = ast.parse(path.read_text())
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "__all__" for alias in node.names):
            return public_names(_absolute(node, package))
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(_items(node.value, tree, package))
    raise LookupError(f"{module} has no __all__")


def _items(value: ast.expr, tree: ast.Module, package: str) -> Iterator[str]:
    assert isinstance(value, (ast.List, ast.Tuple)), ast.dump(value)
    for item in value.elts:
        if isinstance(item, ast.Starred):  # *common.__all__
            assert isinstance(item.value, ast.Attribute) and isinstance(item.value.value, ast.Name)
            yield from public_names(_imported_module(item.value.value.id, tree, package))
        else:
            yield ast.literal_eval(item)


def _imported_module(name: str, tree: ast.Module, package: str) -> str:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return f"{_absolute(node, package)}.{alias.name}"
    raise LookupError(f"{package} does not import {name}")


def _absolute(node: ast.ImportFrom, package: str) -> str:
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])
