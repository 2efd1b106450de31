"""From what the ways take at each size to up to where each is used."""

from __future__ import annotations

import pytest

from ringcomm.transport.carriers import crossing


@pytest.mark.parametrize(
    ("gains", "octaves"),
    [
        ([0.5, 0.3, 0.1, -0.1], 2.5),
        ([0.1, -0.1, -0.3], 0.5),
        ([0.3, 0.2, 0.1], 3.0),  # it goes on falling, and is zero one octave beyond
        ([0.9, 0.8, 0.7], 3.0),  # nothing is known of what is far beyond
        ([-0.5, -0.7, -0.9], -1.0),
        ([0.1, 0.2, 0.3], 3.0),
        ([-0.1, -0.1, -0.1], -1.0),
    ],
)
def test_the_first_way_is_taken_up_to_where_it_loses(gains, octaves):
    assert crossing(gains) == pytest.approx(octaves)


@pytest.mark.parametrize("odd", range(6))
def test_one_time_that_is_off_moves_it_by_less_than_an_octave(odd):
    """Seen on one machine: the same 2 MiB gained 0.06, 0.49 and 0.44 in three processes."""
    gains = [0.65, 0.5, 0.35, 0.2, 0.05, -0.1]
    gains[odd] -= 0.4
    assert abs(crossing(gains) - 13 / 3) < 1.0
