"""What is public is documented, and what is documented is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from pathlib import Path

import pytest

import ringcomm
from ringcomm.docstrings import export
from ringcomm.job.context import Context

PACKAGE = Path(ringcomm.__file__).parent
NATIVE_API = [
    "init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank",
    "cross_size", "is_homogeneous", "allreduce", "allgather", "broadcast", "reducescatter", "alltoall",
    "barrier", "broadcast_object", "allgather_object", "allreduce_", "allgather_", "broadcast_",
    "reducescatter_", "alltoall_", "Average", "Sum", "Min", "Max", "Product", "Context", "run",
]  # fmt: skip
COLLECTIVES = [
    name for name in NATIVE_API if re.match("all|broadcast|reduce|barrier", name) and hasattr(Context, name)
]


def test_every_export_exists_once_and_in_order():
    assert len(set(ringcomm.__all__)) == len(ringcomm.__all__)
    assert ringcomm.__all__ == sorted(ringcomm.__all__)
    assert [name for name in ringcomm.__all__ if not hasattr(ringcomm, name)] == []


def test_the_native_api_is_complete():
    assert [name for name in NATIVE_API if name not in ringcomm.__all__] == []


def test_nothing_is_imported_at_the_top_but_not_exported():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    names = [
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname != "_export"
    ]
    later = ["run"]  # of the launcher, which is imported when it is used
    assert sorted([*names, *later]) == sorted(ringcomm.__all__)


def test_functions_and_methods_have_the_same_signature():
    """But for the process set: those of :func:`ringcomm.add_process_set` belong to the default context."""
    assert len(COLLECTIVES) >= 13
    for name in COLLECTIVES:
        function = inspect.signature(getattr(ringcomm, name)).parameters
        method = inspect.signature(getattr(Context, name)).parameters
        common = [item for item in function.values() if item.name != "process_set"]
        assert common == list(method.values())[1:], name
    own = {name for name, item in vars(Context).items() if inspect.isfunction(item) and name[0] != "_"}
    for name in own - {"announce", "close", "restart", "suspend", "take_changes"}:
        function = inspect.signature(getattr(ringcomm, name)).parameters
        method = inspect.signature(getattr(Context, name)).parameters
        assert list(function.values()) == list(method.values())[1:], name


def test_names_without_modules_and_those_with_an_underscore():
    package = {"rank": len, "_private": len, "os": os, "Average": 1, "elastic": os}
    assert export(package, "elastic", "later") == ["Average", "elastic", "later", "rank"]
    assert package["__all__"] == ["Average", "elastic", "later", "rank"]


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_what_is_built_on_the_package_is_imported_when_it_is_asked_for(monkeypatch):
    monkeypatch.delattr(ringcomm, "elastic", raising=False)
    assert ringcomm.elastic is importlib.import_module("ringcomm.elastic")
    with pytest.raises(AttributeError, match="module 'ringcomm' has no attribute 'nothing'"):
        ringcomm.nothing  # noqa: B018
