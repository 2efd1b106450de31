"""Copies to and from devices overlap with the network: on a virtual clock, the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.device_simulation import Rates, simulate_all_reduce

NBYTES = 32 << 20
NETWORK = 1e9


def ratio(size, algorithm, copy_out, copy_in=None):
    """The time of an all-reduce against the slowest of its parts; rates are multiples of the network's."""
    copy_in = copy_out if copy_in is None else copy_in
    arrays = [np.full(NBYTES // 4, rank + 1, np.float32) for rank in range(size)]
    rates = Rates(copy_out * NETWORK, copy_in * NETWORK, NETWORK)
    taken_s = simulate_all_reduce(rates, arrays, algorithm)
    assert all((array == size * (size + 1) / 2).all() for array in arrays)
    network_s = 2 * (size - 1) / size * NBYTES / NETWORK
    return taken_s / max(NBYTES / rates.copy_out, network_s, NBYTES / rates.copy_in)


@pytest.mark.parametrize("size, algorithm", [(2, "direct"), (3, "direct"), (4, "ring")])
def test_copies_that_are_faster_than_the_network_cost_nothing(size, algorithm):
    assert 1.0 <= ratio(size, algorithm, 11.5) < 1.05
    assert ratio(size, algorithm, 2.0) < 1.15


def test_either_direction_may_be_the_slower_one():
    assert ratio(2, "direct", 10.0, 2.0) < 1.15
    assert ratio(2, "direct", 2.0, 10.0) < 1.15


@pytest.mark.parametrize(
    "size, copy_out, copy_in",
    [(2, 1.5, 1.5), (2, 1.0, 1.0), (2, 0.5, 0.5), (2, 1.0, 4.0), (2, 4.0, 1.0), (4, 1.0, 1.0)],
)
def test_in_blocks_copies_as_slow_as_the_network_cost_nothing(size, copy_out, copy_in):
    """Copying out, the network and copying back overlap block by block, whichever is the slowest."""
    assert 1.0 <= ratio(size, "pipelined", copy_out, copy_in) < 1.15


def test_copies_as_slow_as_the_network_take_half_as_long_again():
    """A rank sends all contributions before results, so copies are idle for a part of the time."""
    assert 1.15 < ratio(2, "direct", 1.0) < 1.7
