"""Several waits: all are made, and the first error is raised after the last."""

from __future__ import annotations

import pytest

from ringcomm._adapter.waiting import run_all
from ringcomm.errors import PeerLostError, ShapeError


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
