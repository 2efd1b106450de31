"""From what the ways take at each size to up to where each is used."""

from __future__ import annotations

import pytest

from ringcomm.transport.carriers import best_cut


@pytest.mark.parametrize(
    ("gains", "cut"),
    [
        ([0.5, 0.2, -0.1, -0.7], 2),
        ([-0.5, -0.2], 0),
        ([0.1, 0.1, 0.1], 3),
        ([0.5, -0.1, 0.6, -0.9], 3),  # one time that is a little wrong changes nothing
        ([0.5, 0.4, -3.0, 0.4], 2),
        ([], 0),
    ],
)
def test_the_first_way_is_taken_up_to_where_it_loses(gains, cut):
    assert best_cut(gains) == cut
