"""Which algorithm serves which message, and that what is built is what was asked for."""

from __future__ import annotations

import pytest

from ringcomm.errors import ConfigError
from ringcomm.schedule import choose, direct, doubling, ring, tree
from ringcomm.schedule.steps import even_bounds
from ringcomm.schedule.verify import check_all_reduce, check_broadcast

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


@pytest.mark.parametrize("name", choose.ALL_REDUCE_NAMES)
def test_override_of_all_reduce(name):
    assert choose.choose_all_reduce(4, 10, 4, needs_single_fold=False, override=name) == name
    expected = name if name in ("one_shot", "direct") else "direct"
    assert choose.choose_all_reduce(4, 10, 4, needs_single_fold=True, override=name) == expected


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'rign'; there are one_shot, direct, ring, doubling"):
        choose.choose_all_reduce(4, 10, 4, needs_single_fold=False, override="rign")
    with pytest.raises(ConfigError, match="tree, chain"):
        choose.choose_broadcast(4, 10, 4, override="ring")
    with pytest.raises(ConfigError, match="direct, ring"):
        choose.choose_reduce_scatter(4, needs_single_fold=True, override="tree")
    with pytest.raises(ConfigError, match="direct, ring"):
        choose.choose_all_gather(4, override="")
    with pytest.raises(ConfigError, match="'x'"):
        choose.build_all_reduce("x", 0, 2, 2)


def test_reduce_scatter_and_all_gather():
    for size, expected in ((1, "direct"), (16, "direct"), (17, "ring")):
        assert choose.choose_reduce_scatter(size, needs_single_fold=False) == expected
        assert choose.choose_all_gather(size) == expected
    assert choose.choose_reduce_scatter(40, needs_single_fold=True) == "direct"
    assert choose.choose_reduce_scatter(4, needs_single_fold=False, override="ring") == "ring"
    assert choose.choose_reduce_scatter(4, needs_single_fold=True, override="ring") == "direct"
    assert choose.choose_all_gather(4, override="ring") == "ring"


def test_broadcast():
    assert choose.choose_broadcast(8, 64 * KIB, 1) == "tree"
    assert choose.choose_broadcast(8, 64 * KIB + 1, 1) == "chain"
    assert choose.choose_broadcast(2, 1 << 30, 1) == "tree"
    assert choose.choose_broadcast(8, 1, 1, override="chain") == "chain"


@pytest.mark.parametrize("size", [1, 2, 7, 16])
@pytest.mark.parametrize("count", [0, 3, 100])
def test_all_that_is_built_is_right(size, count):
    for name in choose.ALL_REDUCE_NAMES:
        single = name in choose.SINGLE_FOLD_NAMES
        built = [choose.build_all_reduce(name, r, size, count) for r in range(size)]
        check_all_reduce(built, count, single_fold=single)
    for name in choose.BROADCAST_NAMES:
        check_broadcast([choose.build_broadcast(name, r, size, 0, count) for r in range(size)], 0, count)


def test_built_by_name():
    bounds = even_bounds(10, 3)
    assert choose.build_all_reduce("ring", 1, 3, 10) == tuple(ring.all_reduce(1, 3, bounds))
    assert choose.build_all_reduce("direct", 1, 3, 10) == tuple(direct.all_reduce(1, 3, bounds))
    assert choose.build_all_reduce("one_shot", 1, 3, 10) == tuple(direct.one_shot(1, 3, 10))
    assert choose.build_all_reduce("doubling", 1, 3, 10) == tuple(doubling.all_reduce(1, 3, 10))
    assert choose.build_reduce_scatter("ring", 1, 3, bounds) == tuple(ring.reduce_scatter(1, 3, bounds))
    assert choose.build_reduce_scatter("direct", 1, 3, bounds) == tuple(direct.reduce_scatter(1, 3, bounds))
    assert choose.build_all_gather("ring", 1, 3, bounds) == tuple(ring.all_gather(1, 3, bounds))
    assert choose.build_all_gather("direct", 1, 3, bounds) == tuple(direct.all_gather(1, 3, bounds))
    assert choose.build_broadcast("tree", 1, 3, 2, 10) == tuple(tree.broadcast(1, 3, 2, 10))
    assert choose.build_broadcast("chain", 1, 3, 2, 10) == tuple(tree.chain(1, 3, 2, 10))
    assert choose.build_all_to_all(1, 3, bounds, bounds) == tuple(direct.all_to_all(1, 3, bounds, bounds))


def test_built_once():
    assert choose.build_all_reduce("ring", 1, 3, 10) is choose.build_all_reduce("ring", 1, 3, 10)
