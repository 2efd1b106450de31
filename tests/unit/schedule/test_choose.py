"""Which algorithm serves which message, and that what is built is what was asked for."""

from __future__ import annotations

import pytest

from ringcomm.schedule import choose
from ringcomm.schedule.select import Selector
from tests.unit.schedule.building import names

KIB = 1024


@pytest.mark.parametrize(
    ("size", "length_bytes", "single", "expected"),
    [
        (1, 4, False, "one_shot"),
        (2, 64 * KIB, False, "one_shot"),
        (2, 64 * KIB + 4, False, "direct"),
        (3, 8 * KIB, False, "one_shot"),
        (16, 8 * KIB, True, "one_shot"),
        (16, 8 * KIB + 4, False, "direct"),
        (16, 1 << 30, True, "direct"),
        (17, 4, False, "doubling"),
        (17, 128 * KIB, False, "doubling"),
        (17, 128 * KIB + 4, False, "ring"),
        (17, 4, True, "direct"),
        (64, 1 << 30, True, "direct"),
        (64, 0, False, "doubling"),
    ],
)
def test_all_reduce(size, length_bytes, single, expected):
    assert choose.choose_all_reduce(size, length_bytes // 4, 4, needs_single_fold=single) == expected


@pytest.mark.parametrize("name", names("allreduce"))
def test_override_of_all_reduce(name):
    assert choose.choose_all_reduce(4, 10, 4, needs_single_fold=False, override=name) == name
    expected = name if name in ("one_shot", "direct") else "direct"
    assert choose.choose_all_reduce(4, 10, 4, needs_single_fold=True, override=name) == expected


def test_reduce_scatter_and_all_gather():
    for size, expected in ((1, "direct"), (16, "direct"), (17, "ring")):
        assert choose.choose_reduce_scatter(size, needs_single_fold=False) == expected
        assert choose.choose_all_gather(size) == expected
    assert choose.choose_reduce_scatter(40, needs_single_fold=True) == "direct"


def test_broadcast():
    assert choose.choose_broadcast(8, 64 * KIB, 1) == "tree"
    assert choose.choose_broadcast(8, 64 * KIB + 1, 1) == "chain"
    assert choose.choose_broadcast(2, 1 << 30, 1) == "tree"


def test_built_once():
    selector = Selector(1, 3)
    assert selector.all_reduce(10, 4, False) is selector.all_reduce(10, 4, False)
    assert selector.all_to_all((0, 1, 2, 3), (0, 1, 2, 3)) is selector.all_to_all((0, 1, 2, 3), (0, 1, 2, 3))
