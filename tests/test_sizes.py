"""Files, those of tests too, have 400 lines at most; functions 60, without parameters and docstring."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator, Tuple, Union

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400
MAX_LINES_OF_A_FUNCTION = 60
"""From its first statement to its last one: without its parameters and its docstring, which may be long."""

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]


def modules() -> Iterator[Tuple[str, str]]:
    """The path and the text of every module of both packages."""
    for top in ("ringcomm", "launcher/ringrun"):
        for path in sorted((ROOT / top).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def files_of_tests() -> Iterator[Tuple[str, str]]:
    """The path and the text of every Python file of the tests."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text()


def statements(function: Function) -> int:
    """The number of lines of a function's statements."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1


def test_modules_are_short():
    long = {name: text.count("\n") for name, text in modules() if text.count("\n") > MAX_LINES}
    assert long == {}


def test_files_of_tests_are_short():
    long = {name: text.count("\n") for name, text in files_of_tests() if text.count("\n") > MAX_LINES}
    assert long == {}


def test_functions_are_short():
    long = {
        f"{name}:{node.lineno} {node.name}": statements(node)
        for name, text in modules()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and statements(node) > MAX_LINES_OF_A_FUNCTION
    }
    assert long == {}


def test_what_counts_of_a_function():
    text = 'def f(\n    a,\n):\n    """Text.\n\n    More.\n    """\n    b = a\n\n    return b\n'
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef) and statements(function) == 3
    (empty,) = ast.parse('def f():\n    """Text."""\n').body
    assert isinstance(empty, ast.FunctionDef) and statements(empty) == 0
