"""Ranks as threads: their results, their errors, and those that do not end."""

from __future__ import annotations

import threading

import pytest

from ringcomm.errors import Misuse
from ringcomm.testing.cluster import RankFailed, errors_of, run_ranks


def test_results_come_in_the_order_of_ranks_and_hosts_have_several():
    places = run_ranks(4, lambda context: (context.host, context.local_rank), ranks_per_host=2)
    assert places == [("host0", 0), ("host0", 1), ("host1", 0), ("host1", 1)]


def test_a_rank_that_fails_is_the_error_of_all():
    def work(context):
        if context.rank == 1:
            raise KeyError("x")
        return context.rank

    with pytest.raises(RankFailed, match="^rank 1: KeyError") as caught:
        run_ranks(2, work)
    assert isinstance(caught.value.__cause__, KeyError)
    assert [type(error) for error in caught.value.errors] == [type(None), KeyError]


def test_a_rank_that_does_not_end():
    over = threading.Event()

    def work(context):
        if context.rank == 1:
            over.wait(30)

    try:
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not end within 0.2 s"):
            run_ranks(2, work, timeout_s=0.2)
    finally:
        over.set()


def test_errors_of_all_ranks_and_a_rank_that_returns():
    def work(context):
        if context.rank < context.size - 1:
            raise Misuse(str(context.rank))
        return context.rank

    def both(context):
        raise Misuse(str(context.rank))

    assert [str(error) for error in errors_of(2, both)] == ["0", "1"]
    with pytest.raises(AssertionError, match=r"ranks \[1\] raised no RingcommError"):
        errors_of(2, work)
    with pytest.raises(AssertionError, match=r"no rank raised; they returned \[0\]"):
        errors_of(1, work)
