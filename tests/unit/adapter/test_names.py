"""Names of variables are equal on ranks that may have created other models before."""

from __future__ import annotations

from typing import Any, NamedTuple, Tuple

import pytest

from ringcomm._adapter.names import group_name, variable_name


class Variable(NamedTuple):
    name: str
    shape: Tuple[Any, ...] = (2, 3)


class KerasVariable(NamedTuple):
    name: str
    path: str


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (Variable("weights:0"), "weights"),
        (Variable("scope_1/weights_12:0"), "scope/weights"),
        (KerasVariable("kernel", "sequential_3/dense_1/kernel"), "sequential/dense/kernel"),
        (Variable("w1"), "w1"),
        (Variable("conv_2d/kernel"), "conv_2d/kernel"),
        (object(), "variable"),
    ],
)
def test_numbers_that_frameworks_append_are_left_out(variable: Any, expected: str) -> None:
    assert variable_name(variable) == expected


def test_groups_of_other_shapes_have_other_names() -> None:
    one = [Variable("a"), Variable("b")]
    other = [Variable("a"), Variable("b", (None, 3))]
    assert group_name(one, "keras") == group_name([Variable("a_1"), Variable("b_7")], "keras")
    assert group_name(one, "keras") != group_name(other, "keras")
    assert group_name(one, "keras").startswith("keras/a[2, 3]..b[2, 3] (2 tensors")
