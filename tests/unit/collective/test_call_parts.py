"""Calls that belong together: other threads are kept out, and what comes between them is reported."""

from __future__ import annotations

import math
import threading

import pytest

from ringcomm.collective.call_runner import Parts
from ringcomm.errors import Misuse, RingcommError


class Runner:
    """Counts calls, and keeps what has been reported."""

    def __init__(self):
        self.started = 0
        self.left = []
        self.lock = threading.RLock()

    def parts(self, count):
        return Parts(self.lock, lambda: self.started, count, self.left.append, RingcommError)

    @property
    def locked(self):
        return self.lock._is_owned()


def leave(runner, count, calls, problem):
    """Leave a block of so many parts by an exception, after so many calls."""
    with pytest.raises(type(problem)) as caught, runner.parts(count):
        assert runner.locked
        runner.started += calls
        raise problem
    assert caught.value is problem and not runner.locked
    return runner.left


@pytest.mark.parametrize("count, calls", [(2, 1), (3, 1), (3, 2), (math.inf, 7)])
def test_an_exception_between_two_parts_is_reported(count, calls):
    runner, problem = Runner(), ZeroDivisionError()
    runner.started = 5  # by earlier blocks, which do not count
    assert leave(runner, count, calls, problem) == [problem]


@pytest.mark.parametrize("count, calls", [(2, 0), (2, 2), (1, 1), (math.inf, 0)])
def test_before_the_first_and_after_the_last_part_no_rank_waits_for_more(count, calls):
    assert leave(Runner(), count, calls, ZeroDivisionError()) == []


def test_errors_that_all_ranks_raise_are_not_reported():
    assert leave(Runner(), 2, 1, Misuse("the same on every rank")) == []


def test_a_block_that_ends_early_without_an_exception_is_complete():
    runner = Runner()
    with runner.parts(2):
        runner.started += 1
    assert runner.left == [] and not runner.locked
