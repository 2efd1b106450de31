"""Gradient buckets and the names of their operations."""

from __future__ import annotations

from typing import Any, NamedTuple, Tuple

import pytest

from ringcomm._adapter.gradients import (
    Gradient,
    bucket_name,
    group_name,
    names_of,
    plan_buckets,
    plan_groups,
    variable_name,
)
from ringcomm.configuration.settings import FIRST_GRADIENTS_BYTES
from ringcomm.errors import ConfigError


def sizes(*nbytes: int, kind: str = "float32"):
    return [Gradient(size, kind) for size in nbytes]


def test_the_first_bucket_is_small_and_none_is_overfull():
    found = plan_buckets(sizes(*[FIRST_GRADIENTS_BYTES] * 17))
    assert found == [[16], list(range(15, 7, -1)), list(range(7, -1, -1))]


def test_a_bucket_has_one_kind_and_kinds_may_alternate():
    mixed = [Gradient(1, "a"), Gradient(1, "b"), Gradient(1, "a"), Gradient(1, "b")]
    assert plan_buckets(mixed) == [[3, 1], [2, 0]]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("groups", [1, 2, 4, 20])
def test_a_number_of_groups(count, groups):
    plan = plan_groups([object() for _ in range(count)], groups)
    assert sorted(index for group in plan for index in group) == list(range(count))
    assert len(plan) == min(groups, count)
    assert max(map(len, plan)) - min(map(len, plan)) <= 1


def test_groups_by_hand_leave_the_others_alone():
    items = [object() for _ in range(5)]
    foreign = object()
    assert plan_groups(items, [[items[1], items[3], foreign], [], [foreign]]) == [[1, 3], [4], [2], [0]]


def test_names():
    a, b = object(), object()
    assert names_of([[a], [b]], None) == {id(a): "noname.0.0", id(b): "noname.1.0"}
    assert names_of([[a, b]], [("x", a), ("y", b)]) == {id(a): "x", id(b): "y"}
    for bad in ([a, b], [("x", a), ("x", b)], [("x", a)]):
        with pytest.raises(ConfigError):
            names_of([[a, b]], bad)


def test_the_name_of_a_bucket_depends_on_its_content():
    assert bucket_name(["w"], [(2, 3)]) == "w"
    one = bucket_name(["w", "v", "u"], [(2, 3), (4,), ()])
    assert one.startswith("w[2, 3]..u[] (3 tensors")
    assert one == bucket_name(["w", "v", "u"], [[2, 3], [4], []])
    assert one != bucket_name(["w", "v", "u"], [(3, 2), (4,), ()])


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
