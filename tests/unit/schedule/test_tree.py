"""Broadcasts, proven for all sizes, and roots other than 0."""

from __future__ import annotations

import pytest

from ringcomm.schedule import tree
from ringcomm.schedule.steps import Recv, Send
from tests.support.prover.verify import check_broadcast

BROADCASTS = [tree.broadcast, tree.chain]


@pytest.mark.parametrize("build", BROADCASTS)
@pytest.mark.parametrize("size", range(1, 65))
def test_all_sizes(build, size):
    count = size - 1
    for root in {0, size // 2}:
        check_broadcast([build(r, size, root, count) for r in range(size)], root, count)


@pytest.mark.parametrize("build", BROADCASTS)
@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_all_roots(build, size, count):
    for root in range(size):
        check_broadcast([build(r, size, root, count) for r in range(size)], root, count)


@pytest.mark.parametrize("size", range(2, 65))
def test_whatever_the_arguments_each_rank_receives_from_the_same_parent(size):
    calls = [(tree.broadcast, 0, 1), (tree.broadcast, size - 1, 0), (tree.chain, size // 2, 7)]
    for build, root, count in calls:
        for rank in range(size):
            steps = build(rank, size, root, count)
            heard = {peer for s in steps if isinstance(s, Recv) for peer in s.peers}
            served = {s.peer for s in steps if isinstance(s, Send)}
            assert rank == 0 or rank & (rank - 1) in heard
            assert served >= {peer for peer in range(rank + 1, size) if peer & (peer - 1) == rank}


@pytest.mark.parametrize("size", range(1, 65))
def test_short_ones_from_rank_0_cost_no_further_message(size):
    steps = [step for rank in range(size) for step in tree.broadcast(rank, size, 0, 1)]
    assert len(steps) == 2 * (size - 1)


@pytest.mark.parametrize("build", BROADCASTS)
def test_an_empty_message_goes_to_the_same_peers(build):
    for rank in range(6):
        full = build(rank, 6, 2, 100)
        assert [s._replace(start=0, stop=0) for s in full] == build(rank, 6, 2, 0)


@pytest.mark.parametrize("size", range(1, 65))
def test_a_binomial_tree_is_as_deep_as_the_logarithm(size):
    depth = {0: 0}
    for rank in range(1, size):  # parents have lower positions
        (recv,) = (s for s in tree.broadcast(rank, size, 0, 1) if isinstance(s, Recv))
        depth[rank] = depth[recv.peers[0]] + 1
    assert max(depth.values()) <= (size - 1).bit_length()
    sends = [sum(isinstance(s, Send) for s in tree.broadcast(r, size, 0, 1)) for r in range(size)]
    assert sends[0] == (size - 1).bit_length() == max(sends)
