"""Split nested state into its arrays and the remaining structure, and join them again."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Sequence, Tuple


class Leaf(NamedTuple):
    """Placeholder for the array with this index."""

    number: int


def take_apart(tree: Any, is_array: Callable[[Any], bool]) -> Tuple[Any, List[Any]]:
    """Copy nested dicts, lists and tuples with a :class:`Leaf` for every array; return it and the arrays."""
    arrays: List[Any] = []

    def copied(node: Any) -> Any:
        if is_array(node):
            arrays.append(node)
            return Leaf(len(arrays) - 1)
        if isinstance(node, dict):
            return {key: copied(value) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(copied(item) for item in node)
        return node

    return copied(tree), arrays


def put_together(tree: Any, arrays: Sequence[Any]) -> Any:
    """Return the structure with its arrays, the inverse of :func:`take_apart`."""
    if isinstance(tree, Leaf):
        return arrays[tree.number]
    if isinstance(tree, dict):
        return {key: put_together(value, arrays) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(put_together(item, arrays) for item in tree)
    return tree
