"""Waits for several operations, the causes of frameworks' errors, and trees of arrays."""

from __future__ import annotations

import pytest

import ringcomm as rc
from ringcomm._adapter.reduction import predivided
from ringcomm._adapter.submit import cause_of, record_cause, run_all, with_causes
from ringcomm._adapter.trees import put_together, take_apart
from ringcomm.config import Membership
from ringcomm.errors import PeerLostError, ShapeError


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


LOST = "rank 5 (jetson5) was lost while others were in allreduce"


def of_a_framework(error):
    return RuntimeError(f"INTERNAL: CpuCallback error: {type(error).__name__}: {error}\n  at step 3")


def test_it_is_found_by_its_text(alone):
    lost = rc.PeerLostError(LOST)
    record_cause(lost)
    assert cause_of(of_a_framework(lost)) is lost
    assert cause_of(RuntimeError("another mistake")) is None


def test_errors_of_an_earlier_job_are_ignored(alone):
    """Otherwise a program that quotes it would be started again for ever."""
    record_cause(rc.PeerLostError(LOST))
    rc.shutdown()
    rc.init(Membership())
    assert cause_of(RuntimeError(f"no data left after: {LOST}")) is None


def test_an_error_of_a_framework_is_replaced_by_its_cause(alone):
    lost = rc.PeerLostError(LOST)
    record_cause(lost)
    foreign = of_a_framework(lost)
    with pytest.raises(rc.PeerLostError) as caught, with_causes():
        raise foreign
    assert caught.value is lost and lost.__cause__ is foreign
