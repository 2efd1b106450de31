"""The model against the formulas in the algorithms' docstrings."""

from __future__ import annotations

from math import log2

import pytest

from ringcomm.errors import BrokenInvariantError
from ringcomm.schedule import direct, doubling, hierarchy, ring, tree
from ringcomm.schedule.cost import CostModel, predict
from ringcomm.schedule.steps import Recv, Send, even_bounds

ALPHA, BETA, GAMMA = 50e-6, 1e-9, 2e-10
MODEL = CostModel(latency_s=ALPHA, byte_s=BETA, reduce_byte_s=GAMMA)


def price(build, size, model=MODEL, item_bytes=4):
    return predict([build(r) for r in range(size)], item_bytes, model)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("count", [160, 16000])
def test_ring(size, count):
    n, p, bounds = 4 * count, size, even_bounds(count, size)
    expected = 2 * (p - 1) * ALPHA + (p - 1) / p * n * (2 * BETA + GAMMA)
    assert price(lambda r: ring.all_reduce(r, p, bounds), p) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 4, 16])
def test_direct(size):
    n, p, bounds = 64000, size, even_bounds(16000, size)
    expected = 2 * ALPHA + (p - 1) / p * n * (2 * BETA + GAMMA)
    assert price(lambda r: direct.all_reduce(r, p, bounds), p) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_one_shot(size):
    n, p = 4000, size
    expected = ALPHA + (p - 1) * n * (BETA + GAMMA)
    assert price(lambda r: direct.one_shot(r, p, 1000), p) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 8, 32])
def test_doubling(size):
    n = 4000
    expected = log2(size) * (ALPHA + n * (BETA + GAMMA))
    assert price(lambda r: doubling.all_reduce(r, size, 1000), size) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 4, 16])
def test_binomial_tree(size):
    expected = log2(size) * (ALPHA + 4000 * BETA)
    assert price(lambda r: tree.broadcast(r, size, 1, 1000), size) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 3, 10])
def test_chain_is_a_pipeline_of_segments(size):
    n, segment = 4_000_000, 1000
    model = MODEL._replace(segment_bytes=segment)
    expected = (size - 1) * ALPHA + (n + (size - 2) * segment) * BETA
    assert price(lambda r: tree.chain(r, size, 0, n // 4), size, model) == pytest.approx(expected)


def test_messages_occupy_the_ports():
    model = CostModel(0.0, 0.0, 0.0, message_s=1.0)
    assert price(lambda r: direct.one_shot(r, 5, 1), 5, model) == pytest.approx(4.0)
    assert price(lambda r: ring.all_reduce(r, 5, even_bounds(5, 5)), 5, model) == pytest.approx(8.0)


def test_a_receive_waits_for_what_is_still_to_be_sent():
    """Rank 0 must send its old value on a slow way before it may take the new one."""
    swap = [[Send(1, 0, 1000), Recv((1,), 0, 1000)], [Recv((0,), 0, 1000), Send(0, 0, 1000)]]
    assert predict(swap, 1, MODEL) == pytest.approx(2 * (ALPHA + 1000 * BETA))


def test_a_deadlock_has_no_price():
    with pytest.raises(BrokenInvariantError, match="deadlock"):
        predict([[Recv((1,), 0, 1), Send(1, 0, 1)], [Recv((0,), 0, 1), Send(0, 0, 1)]], 1, MODEL)


class TestHosts:
    """Ranks of one host share its interface."""

    MODEL = CostModel(1e-6, 1e-10, 0.0, hosts=(0, 0, 1, 1), wire_latency_s=1e-3, wire_byte_s=(1e-8, 1e-8))

    def test_inside_a_host_the_wire_does_not_matter(self):
        steps = [[Send(1, 0, 1000)], [Recv((0,), 0, 1000)], [], []]
        assert predict(steps, 1, self.MODEL) == pytest.approx(1e-6 + 1000 * 1e-10)

    def test_two_ranks_send_to_two_others_over_one_wire(self):
        steps = [[Send(2, 0, 1000)], [Send(3, 0, 1000)], [Recv((0,), 0, 1000)], [Recv((1,), 0, 1000)]]
        assert predict(steps, 1, self.MODEL) == pytest.approx(1e-3 + 2 * 1000 * 1e-8)

    def test_the_slower_interface_limits_a_pair(self):
        model = self.MODEL._replace(wire_byte_s=(1e-8, 5e-8))
        steps = [[Send(2, 0, 1000)], [], [Recv((0,), 0, 1000)], []]
        assert predict(steps, 1, model) == pytest.approx(1e-3 + 1000 * 5e-8)

    def test_a_slow_receiver_keeps_no_rank_from_serving_others(self):
        """Rank 0 sends to the slow host of ranks 2 and 3 first, then to rank 1."""
        model = self.MODEL._replace(hosts=(0, 1, 2, 2), wire_byte_s=(1e-8, 1e-8, 1e-6))
        steps = [[Send(2, 0, 1000), Send(1, 0, 1000)], [Recv((0,), 0, 1000)], [Recv((0,), 0, 1000)], []]
        assert predict(steps, 1, model) == pytest.approx(1e-3 + 1000 * 1e-6)

    def test_hierarchical_saves_the_wire(self):
        hosts, bounds = ((0, 1), (2, 3)), even_bounds(1_000_000, 4)
        flat = price(lambda r: direct.all_reduce(r, 4, bounds), 4, self.MODEL)
        deep = price(lambda r: hierarchy.all_reduce(r, hosts, bounds), 4, self.MODEL)
        assert 1.7 < flat / deep < 2.3


@pytest.mark.parametrize("size", [3, 5, 7])
def test_chunks_that_are_not_quite_equal_cost_no_more(size):
    """A rank that can begin a little earlier must not take a port for later."""
    even, odd = (
        price(lambda r, n=n: direct.all_reduce(r, size, even_bounds(n, size)), size)
        for n in (size * 1000_000, size * 1000_000 + 1)
    )
    assert odd == pytest.approx(even, rel=1e-4)
