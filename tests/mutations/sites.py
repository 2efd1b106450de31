"""Small changes to Python source, each of which should make a test fail.

A site is one expression or statement and one way to change it. Sites are found in the syntax tree; the
change is made in the text, so that everything else stays as it is, comments and line numbers too.
"""

from __future__ import annotations

import ast
import copy
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Type

_COMPARISONS: Dict[Type[ast.cmpop], Type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: Dict[Type[ast.operator], Type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)


class Site(NamedTuple):
    """One change to one file.

    Attributes:
        file: path from the project's root.
        line, column: where it is, from 1 and from 0.
        end_line, end_column: where what is replaced ends.
        kind: the kind of change.
        wrong: the text that is put there.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    kind: str
    wrong: str

    def apply(self, source: str) -> str:
        """The file's text with the change."""
        lines = source.encode("utf-8").split(b"\n")
        before = b"\n".join([*lines[: self.line - 1], lines[self.line - 1][: self.column]])
        after = b"\n".join([lines[self.end_line - 1][self.end_column :], *lines[self.end_line :]])
        return (before + self.wrong.encode("utf-8") + after).decode("utf-8")

    def right(self, source: str) -> str:
        """The text that is replaced."""
        lines = source.encode("utf-8").split(b"\n")[self.line - 1 : self.end_line]
        lines[-1] = lines[-1][: self.end_column]
        lines[0] = lines[0][self.column :]
        return b"\n".join(lines).decode("utf-8")


def sites_of(file: str, source: str) -> List[Site]:
    """All changes to one file, in the order of its lines.

    Text for people is left alone (strings, what is logged or raised with it), and so are annotations, checks
    for a type checker, and branches for other systems than Linux.
    """
    found = []
    for node in _code(ast.parse(source)):
        for kind, changed in _changes(node):
            wrong = ast.unparse(changed)
            if isinstance(node, ast.expr):
                wrong = f"({wrong})"
            elif isinstance(node, ast.If):  # the condition alone
                node = node.test  # noqa: PLW2901
            elif "\n" in wrong:
                continue
            assert node.end_lineno is not None and node.end_col_offset is not None
            place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            found.append(Site(file, *place, kind, wrong))
    return sorted(set(found))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are code which runs."""
    if isinstance(node, ast.JoinedStr) or _is_text(node):
        return
    if isinstance(node, ast.If) and _not_here(node.test):
        return
    yield node
    if _is_negative(node):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(
            node, ast.Call
        ):
            continue
        if isinstance(node, ast.Raise) and name == "exc":
            continue  # The arguments of an exception are facts for its text.
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from _code(item)


def _is_text(node: ast.AST) -> bool:
    """Return whether it is a docstring, or a call that logs."""
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    called = node.value.func if isinstance(node.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in ("debug", "info", "warning")


def _not_here(test: ast.expr) -> bool:
    """Return whether the branch is for a type checker, or depends on the system or the version of Python."""
    words = ast.unparse(test)
    return any(word in words for word in ("TYPE_CHECKING", "sys.platform", "os.name", "sys.version_info"))


def _changes(node: ast.AST) -> Iterator[Tuple[str, ast.AST]]:
    for kind, change in _KINDS.items():
        changed = change(node)
        if changed is not None:
            yield kind, changed


def _comparison(node: ast.AST) -> Optional[ast.AST]:
    if not isinstance(node, ast.Compare):
        return None
    changed = copy.deepcopy(node)
    changed.ops[0] = _COMPARISONS[type(node.ops[0])]()
    return changed


def _operator(node: ast.AST) -> Optional[ast.AST]:
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return None
    if any(isinstance(side, (ast.JoinedStr, ast.List, ast.Tuple)) for side in (node.left, node.right)):
        return None
    if any(isinstance(getattr(side, "value", None), (str, bytes)) for side in (node.left, node.right)):
        return None
    return ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)


def _and_or(node: ast.AST) -> Optional[ast.AST]:
    if not isinstance(node, ast.BoolOp):
        return None
    return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def _negation(node: ast.AST) -> Optional[ast.AST]:
    return node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else None


def _is_negative(node: ast.AST) -> bool:
    """Return whether it is a number like -1, which stands for nothing or unknown and is as good as -2."""
    if not isinstance(node, ast.UnaryOp) or not isinstance(node.op, ast.USub):
        return False
    return _constant(node.operand) is not None


def _sign(node: ast.AST) -> Optional[ast.AST]:
    return node.operand if isinstance(node, ast.UnaryOp) and _is_negative(node) else None


def _constant(node: ast.AST) -> Optional[ast.AST]:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int):
        return None
    return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)


def _branches(node: ast.AST) -> Optional[ast.AST]:
    """Both branches of a condition swapped, or what it guards done in the other case."""
    if isinstance(node, ast.IfExp):
        return ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.If):
        return ast.UnaryOp(ast.Not(), node.test)
    return None


def _dropped(node: ast.AST) -> Optional[ast.AST]:
    """Nothing in place of a statement with an effect. Names that would be unknown then stay as they are."""
    if not isinstance(node, _DROPPED):
        return None
    if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Yield, ast.YieldFrom, ast.Constant)):
        return None
    if isinstance(node, ast.Assign) and not all(
        isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets
    ):
        return None
    return ast.Pass()


_KINDS: Dict[str, Callable[[ast.AST], Optional[ast.AST]]] = {
    "comparison": _comparison,
    "operator": _operator,
    "and/or": _and_or,
    "negation": _negation,
    "constant": _constant,
    "sign": _sign,
    "branches": _branches,
    "statement": _dropped,
}
