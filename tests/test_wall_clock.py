"""No test asserts that something takes less than so many seconds: on a loaded machine it would fail.

Waiting for an event until a generous limit is over is something else, and so is a least time.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator

import pytest

TESTS = Path(__file__).resolve().parent
CLOCKS = {"monotonic", "perf_counter", "time"}
"""Of ``time``; not ``process_time``, which does not pass while other processes run."""


def is_elapsed(node: ast.expr) -> bool:
    """Return whether an expression is a clock's time less something."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and isinstance(node.left, ast.Call)
        and (getattr(node.left.func, "attr", None) or getattr(node.left.func, "id", None)) in CLOCKS
    )


def asserted_limits(tree: ast.AST) -> Iterator[int]:
    """The lines of assertions that an elapsed time, or a variable that holds one, is less than something."""
    inside = list(ast.walk(tree))
    names = {
        target.id
        for node in inside
        if isinstance(node, ast.Assign) and is_elapsed(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for statement in inside:
        if isinstance(statement, ast.Assert):
            comparisons = (node for node in ast.walk(statement.test) if isinstance(node, ast.Compare))
            if any(_has_limit(comparison, names) for comparison in comparisons):
                yield statement.lineno


def _has_limit(comparison: ast.Compare, names: set[str]) -> bool:
    operands = [comparison.left, *comparison.comparators]
    for left, operator, right in zip(operands, comparison.ops, operands[1:]):
        if isinstance(operator, (ast.Lt, ast.LtE)):
            less = left
        elif isinstance(operator, (ast.Gt, ast.GtE)):
            less = right
        else:
            continue
        if is_elapsed(less) or (isinstance(less, ast.Name) and less.id in names):
            return True
    return False


def test_no_test_asserts_a_wall_clock_time() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if any(f"{clock}()" in path.read_text() for clock in CLOCKS)
        for line in asserted_limits(ast.parse(path.read_text()))
    }
    assert not found, "wait for an event until a generous limit instead: " + ", ".join(sorted(found))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("assert time.monotonic() - began < 5", 1),
        ("assert 2 < perf_counter() - began <= LIMIT_S, text", 1),
        ("assert 5 > time.time() - began", 1),
        ("took = time.monotonic() - began\nassert ended and took < 5", 1),
        ("assert time.monotonic() - began > 2", 0),
        ("assert time.monotonic() < until", 0),
        ("assert count <= 2 + time.monotonic() - began", 0),
    ],
)
def test_what_counts(text: str, count: int) -> None:
    assert len(list(asserted_limits(ast.parse(text)))) == count
