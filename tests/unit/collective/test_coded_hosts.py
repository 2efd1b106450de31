"""All-reduce with a codec where hosts have several ranks: sums inside the hosts, codes between them."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.codec.codecs import BLOCK_ITEMS, make_codec
from ringcomm.collective.coded import CodedPlans
from ringcomm.collective.coded_hosts import HostCodedExecution
from ringcomm.collective.reduce import Kernel
from ringcomm.dtypes import code_of
from ringcomm.ops import CODECS, Average, Collective, Sum
from ringcomm.schedule.select import Selector
from ringcomm.schedule.steps import even_bounds
from ringcomm.testing.faulty import Cut, Faults
from ringcomm.transport.base import LinkClosed
from ringcomm.transport.memory import memory_fabrics
from ringcomm.wire.frames import NO_ROOT, Header
from tests.support.simulation import simulate_coded
from tests.unit.collective.test_coded import gradients, through

GRIDS = [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]]
LEAST = 16384
"""The shortest vector that is added up inside the hosts first."""


def run(name, arrays, hosts, op=Sum, residuals=None, seed=1, **options):
    data = [array.copy() for array in arrays]
    number = CODECS.index(name)
    errors = simulate_coded(number, data, seed=seed, op=op, residuals=residuals, host_index=hosts, **options)
    assert errors == [None] * len(data)
    assert len({array.tobytes() for array in data}) == 1, "the ranks end with different bits"
    return data[0]


def model(name, arrays, hosts, op):
    """The same arithmetic, one column and chunk after the other."""
    codec, size = make_codec(name), len(arrays)
    groups = [[rank for rank in range(size) if hosts[rank] == host] for host in sorted(set(hosts))]
    edges, pieces = even_bounds(arrays[0].size, len(groups[0])), []
    for first, last in zip(edges, edges[1:]):
        sums = []
        for ranks in groups:
            total = arrays[ranks[0]][first:last].copy()
            for rank in ranks[1:]:
                total += arrays[rank][first:last]
            sums.append(total)
        bounds = Selector(0, len(groups)).coded_bounds(last - first, BLOCK_ITEMS)
        for owner, (start, stop) in enumerate(zip(bounds, bounds[1:])):
            total = None
            for host, item in enumerate(sums):
                mine = item[start:stop] if host == owner else through(codec, item[start:stop])
                total = mine.copy() if total is None else total + mine
            pieces.append(through(codec, total / np.float32(size) if op == Average else total))
    return np.concatenate(pieces)


@pytest.mark.parametrize("hosts", GRIDS)
@pytest.mark.parametrize("name", CODECS[1:])
def test_the_numbers_are_what_the_model_says(name, hosts):
    for count, op in ((LEAST, Sum), (LEAST + 5, Average), (3 * LEAST + 1, Average)):
        arrays = gradients(len(hosts), count)
        assert run(name, arrays, hosts, op).tobytes() == model(name, arrays, hosts, op).tobytes()


def test_any_order_of_events_and_short_reads_give_the_same_bits():
    hosts = [0, 0, 1, 1]
    arrays = gradients(4, LEAST)
    expected = run("int8", arrays, hosts, Average).tobytes()
    for seed in range(3):
        faults = Faults(seed=seed, most_bytes=6007, delay=0.05, most_turns=9)
        found = run("int8", arrays, hosts, Average, seed=seed, capacity_bytes=9973, faults=faults)
        assert found.tobytes() == expected


@pytest.mark.parametrize("op", [Sum, Average])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_was_delivered_and_the_residuals_are_the_sum_of_all_gradients(name, op):
    hosts, size, steps = [0, 0, 1, 1], 4, 8
    # Some are from the time when every rank exchanged with every other: they are delivered, not kept.
    residuals = [array * np.float32(1e-2) for array in gradients(size, LEAST, seed=99)]
    true = np.sum([array.astype(np.float64) for array in residuals], axis=0)
    delivered = np.zeros(LEAST)
    for step in range(steps):
        arrays = gradients(size, LEAST, seed=step)
        result = run(name, arrays, hosts, op, residuals).astype(np.float64)
        delivered += result * (size if op == Average else 1)
        true += np.sum([array.astype(np.float64) for array in arrays], axis=0)
    left = np.sum([array.astype(np.float64) for array in residuals], axis=0)
    assert np.abs(left).max() > 0
    assert all((np.asarray(item) != 0).mean() < 0.51 for item in residuals), "outside of the rank's column"
    scale = np.abs(true) + np.abs(left) + 1e-1
    assert np.max(np.abs(delivered + left - true) / scale) < 1e-3


def test_only_one_rank_of_each_host_talks_to_the_same_rank_elsewhere():
    hosts = [0, 0, 1, 1]
    fabric = memory_fabrics(4)[1]
    single = np.dtype(np.float32)
    header = Header(0, 1, Collective.ALLREDUCE, Sum, code_of(single), NO_ROOT, LEAST, 0, codec=3)
    kernel = Kernel(Sum, single, 4)
    plans = CodedPlans(fabric, Selector(1, 4, host_index=hosts))
    execution = plans.execution(header, LEAST, kernel)
    assert isinstance(execution, HostCodedExecution)
    volume = execution.volume()
    codes = make_codec("int8").encoded_bytes(LEAST // 4)
    assert set(volume) == {0, 3}
    assert codes * 2 <= volume[3][0] < codes * 2 + 400, "one column's codes there and back"
    assert not isinstance(plans.execution(header, LEAST - 1, kernel), HostCodedExecution)


@pytest.mark.parametrize("algorithm, expected", [(None, True), ("hierarchical", True), ("direct", False)])
def test_the_algorithm_of_the_user(algorithm, expected):
    selector = Selector(0, 4, algorithm, host_index=[0, 0, 1, 1])
    assert (selector.coded_hosts(LEAST) is not None) == expected
    assert Selector(0, 3, algorithm, host_index=[0, 0, 1]).coded_hosts(LEAST) is None


@pytest.mark.parametrize("link", [(0, 1), (1, 3)])
def test_a_cut_link_is_an_error_or_harmless(link):
    for offset in (0, 70, 3000, 20000):
        data = gradients(4, LEAST)
        faults = Faults(seed=offset, cuts=(Cut(*link, True, offset),))
        errors = simulate_coded(3, data, seed=offset, faults=faults, host_index=[0, 0, 1, 1])
        assert all(error is None or isinstance(error, LinkClosed) for error in errors)
        assert offset > 3000 or any(errors), "the link carries more than that"
