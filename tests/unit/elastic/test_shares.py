"""Shares of an epoch's samples."""

from __future__ import annotations

import pytest

from ringcomm.elastic.sampler import plan_share


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("processed", [0, 5, 9, 10, 12])
def test_every_rank_gets_the_same_number_of_samples_and_none_is_left_out(size, processed):
    shares = [plan_share(10, rank, size, 1, 2, True, processed) for rank in range(size)]
    assert len({len(share.indices) for share in shares}) == 1
    left = set(shares[0].remaining)
    assert {index for share in shares for index in share.indices} == left
    assert len(left) == max(0, 10 - processed)
    assert all(share.remaining == shares[0].remaining for share in shares)


def test_the_order_is_that_of_the_epoch():
    assert plan_share(4, 1, 2, shuffle=False).indices == [1, 3]
    assert plan_share(50, 0, 1, epoch=1).remaining != plan_share(50, 0, 1, epoch=2).remaining
