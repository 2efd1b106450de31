"""Recursive doubling, proven for all sizes."""

from __future__ import annotations

import pytest

from ringcomm.schedule import doubling
from ringcomm.schedule.steps import Recv, Send
from tests.support.prover.verify import check_all_reduce


@pytest.mark.sampled
@pytest.mark.parametrize("count", [0, 1, 1000])
@pytest.mark.parametrize("size", range(1, 65))
def test_all_reduce_of_all_sizes(size, count):
    check_all_reduce([doubling.all_reduce(r, size, count) for r in range(size)], count)


@pytest.mark.parametrize("size", range(2, 65))
def test_rounds_and_final_folds(size):
    rounds = size.bit_length() - 1
    for rank in range(size):
        steps = doubling.all_reduce(rank, size, 9)
        folds = [s for s in steps if isinstance(s, Recv) and s.fold]
        if not folds:  # sits out: hands over, and receives the finished vector
            assert steps == [Send(rank + 1, 0, 9), Recv((rank + 1,), 0, 9)]
            continue
        assert len(folds) in (rounds, rounds + 1)
        assert [f.final for f in folds] == [False] * (len(folds) - 1) + [True]


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_an_empty_message_goes_to_the_same_peers(size):
    for rank in range(size):
        full = doubling.all_reduce(rank, size, 100)
        assert [s._replace(stop=0) for s in full] == doubling.all_reduce(rank, size, 0)
