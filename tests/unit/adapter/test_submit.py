"""Arguments of operations, waits for several of them, and trees of arrays."""

from __future__ import annotations

import pytest

import ringcomm as rc
from ringcomm._adapter.reduction import checked_passes, predivided, scattered_reduction
from ringcomm._adapter.submit import SequenceName, run_all, wire_name
from ringcomm._adapter.trees import put_together, take_apart
from ringcomm.errors import PeerLostError, ShapeError


def test_a_reducescatter_is_not_adasum():
    with pytest.raises(NotImplementedError):
        scattered_reduction(rc.Adasum)
    assert scattered_reduction(1) is rc.Sum


def test_the_passes_of_a_step():
    assert checked_passes(1) == 1 and checked_passes(4) == 4
    for bad in (0, -1):
        with pytest.raises(ValueError, match="backward_passes_per_step must be > 0, not"):
            checked_passes(bad)


def test_wire_name():
    assert wire_name("allreduce", "x") == "allreduce.x"
    assert wire_name("allreduce", None) == wire_name("allreduce", "") == ""


def test_a_sequence_has_one_name_for_all_kinds():
    name = SequenceName("steps")
    assert wire_name("allreduce", name) == wire_name("barrier", name) == "steps"


def test_predivided():
    assert predivided(rc.Sum, 1.0) == (1.0, 1.0)
    assert predivided(rc.Average, 4) == (0.25, 4.0)
    with pytest.raises(ValueError):
        predivided(rc.Sum, 2.0)


def test_trees():
    tree = {"a": [1, 2.5, {"b": (3, "x")}], "c": 4}
    skeleton, leaves = take_apart(tree, lambda item: isinstance(item, int))
    assert leaves == [1, 3, 4]
    assert put_together(skeleton, [10, 30, 40]) == {"a": [10, 2.5, {"b": (30, "x")}], "c": 40}
    assert put_together(skeleton, leaves) == tree


def test_results_are_in_order():
    assert run_all([]) == []
    assert run_all([lambda: 1, lambda: None, lambda: [2]]) == [1, None, [2]]


def test_the_first_error_is_raised_when_all_have_ended():
    ended = []

    def end(number, error=None):
        ended.append(number)
        if error is not None:
            raise error

    with pytest.raises(ShapeError, match="first"):
        lost = PeerLostError("second", rank=1)
        run_all([lambda: end(1), lambda: end(2, ShapeError("first")), lambda: end(3, lost), lambda: end(4)])
    assert ended == [1, 2, 3, 4]


def test_a_bug_is_not_kept_back():
    with pytest.raises(ZeroDivisionError):
        run_all([lambda: 1 // 0, lambda: pytest.fail("not reached")])
