"""Which algorithm serves which message, and that what is built is what was asked for."""

from __future__ import annotations

import pytest

from ringcomm.errors import ConfigError
from ringcomm.schedule import choose, direct, doubling, registry, ring, tree
from ringcomm.schedule.select import Selector
from ringcomm.schedule.steps import even_bounds
from tests.support.prover.verify import check_all_reduce, check_broadcast
from tests.unit.schedule.building import make, names

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


def test_unknown_names_are_refused_with_the_known_ones():
    known = "one_shot, direct, doubling, hierarchical, ring"
    with pytest.raises(ConfigError, match=f"'rign'; there are {known}"):
        choose.choose_all_reduce(4, 10, 4, needs_single_fold=False, override="rign")
    with pytest.raises(ConfigError, match="tree, chain"):
        make("broadcast", "ring", 0, 4, 10)
    for kind in ("reducescatter", "allgather"):
        with pytest.raises(ConfigError, match="direct, .*ring"):
            make(kind, "tree", 0, 4, 10)
    with pytest.raises(ConfigError, match="'x'"):
        make("allreduce", "x", 0, 2, 2)


def test_reduce_scatter_and_all_gather():
    for size, expected in ((1, "direct"), (16, "direct"), (17, "ring")):
        assert choose.choose_reduce_scatter(size, needs_single_fold=False) == expected
        assert choose.choose_all_gather(size) == expected
    assert choose.choose_reduce_scatter(40, needs_single_fold=True) == "direct"


def test_broadcast():
    assert choose.choose_broadcast(8, 64 * KIB, 1) == "tree"
    assert choose.choose_broadcast(8, 64 * KIB + 1, 1) == "chain"
    assert choose.choose_broadcast(2, 1 << 30, 1) == "tree"


@pytest.mark.parametrize("size", [1, 2, 7, 16])
@pytest.mark.parametrize("count", [0, 3, 100])
def test_all_that_is_built_is_right(size, count):
    for name in names("allreduce"):
        single = registry.algorithm("allreduce", name).single_fold
        built = [make("allreduce", name, r, size, count) for r in range(size)]
        check_all_reduce(built, count, single_fold=single)
    for name in names("broadcast"):
        check_broadcast([make("broadcast", name, r, size, count, root=0) for r in range(size)], 0, count)


def test_built_by_name():
    bounds = even_bounds(10, 3)
    for collective, name, expected in (
        ("allreduce", "ring", ring.all_reduce(1, 3, bounds)),
        ("allreduce", "direct", direct.all_reduce(1, 3, bounds)),
        ("allreduce", "one_shot", direct.one_shot(1, 3, 10)),
        ("allreduce", "doubling", doubling.all_reduce(1, 3, 10)),
        ("reducescatter", "ring", ring.reduce_scatter(1, 3, bounds)),
        ("reducescatter", "direct", direct.reduce_scatter(1, 3, bounds)),
        ("allgather", "ring", ring.all_gather(1, 3, bounds)),
        ("allgather", "direct", direct.all_gather(1, 3, bounds)),
        ("broadcast", "tree", tree.broadcast(1, 3, 2, 10)),
        ("broadcast", "chain", tree.chain(1, 3, 2, 10)),
    ):
        assert make(collective, name, 1, 3, 10, root=2) == tuple(expected)
    assert Selector(1, 3).all_to_all(bounds, bounds) == tuple(direct.all_to_all(1, 3, bounds, bounds))


def test_built_once():
    selector = Selector(1, 3)
    assert selector.all_reduce(10, 4, False) is selector.all_reduce(10, 4, False)
    assert selector.all_to_all((0, 1, 2, 3), (0, 1, 2, 3)) is selector.all_to_all((0, 1, 2, 3), (0, 1, 2, 3))
