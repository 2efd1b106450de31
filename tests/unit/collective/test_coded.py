"""All-reduce with a codec, also with sums inside the hosts: the numbers against models, bits, faults."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.codec.codecs import BLOCK_ITEMS, SEGMENT_ITEMS, make_codec
from ringcomm.collective.coded import CodedPlans, HostCodedExecution
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

SIZES = [2, 3, 7]
NAMES = CODECS[1:]


def gradients(size, count, seed=0):
    """Per rank, values of very different magnitudes."""
    generator = np.random.default_rng((seed, size, count))
    scale = 10.0 ** generator.uniform(-3, 2, count)
    return [(generator.standard_normal(count) * scale).astype(np.float32) for _ in range(size)]


def run(name, arrays, op=Sum, residuals=None, seed=1, **options):
    data = [array.copy() for array in arrays]
    errors = simulate_coded(CODECS.index(name), data, seed=seed, op=op, residuals=residuals, **options)
    assert errors == [None] * len(data)
    assert len({array.tobytes() for array in data}) == 1, "the ranks end with different bits"
    return data[0]


def through(codec, values):
    """A chunk encoded and decoded, segment by segment."""
    out = np.empty_like(values)
    for start in range(0, values.size, SEGMENT_ITEMS):
        piece = values[start : start + SEGMENT_ITEMS]
        codec.encode(
            piece, np.empty(codec.encoded_bytes(piece.size), np.uint8), out[start : start + SEGMENT_ITEMS]
        )
    return out


def model(name, arrays, op):
    """The same arithmetic, one chunk after the other."""
    codec, size = make_codec(name), len(arrays)
    bounds = Selector(0, size).coded_bounds(arrays[0].size, BLOCK_ITEMS)
    pieces = []
    for owner, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        total = None
        for rank, array in enumerate(arrays):
            mine = array[start:stop] if rank == owner else through(codec, array[start:stop])
            total = mine.copy() if total is None else total + mine
        pieces.append(through(codec, total / np.float32(size) if op == Average else total))
    return np.concatenate(pieces)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_length_is_what_the_model_says(name, size):
    for count in (0, 1, 2, 255, 256, 257, 256 * size - 1, 256 * size, 256 * size + 1, 1300):
        arrays = gradients(size, count)
        for op in (Sum, Average):
            assert run(name, arrays, op).tobytes() == model(name, arrays, op).tobytes()


@pytest.mark.parametrize("op", [Sum, Average])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", ["int8", "int4", "bf16"])
def test_what_was_delivered_and_the_residuals_are_the_sum_of_all_gradients(name, size, op):
    count, steps = 1500, 12
    residuals = [np.zeros(count, np.float32) for _ in range(size)]
    delivered, true = np.zeros(count), np.zeros(count)
    for step in range(steps):
        arrays = gradients(size, count, seed=step)
        delivered += run(name, arrays, op, residuals).astype(np.float64) * (size if op == Average else 1)
        true += np.sum([array.astype(np.float64) for array in arrays], axis=0)
    left = np.sum([array.astype(np.float64) for array in residuals], axis=0)
    scale = np.abs(true) + np.abs(left) + 1e-3
    assert np.max(np.abs(delivered + left - true) / scale) < 1e-4
    without = np.zeros(count)
    for step in range(steps):
        without += run(name, gradients(size, count, seed=step), Sum).astype(np.float64)
    if name == "int4":
        # What error feedback is for: without it errors add up.
        assert np.abs(delivered - true).mean() < 0.6 * np.abs(without - true).mean()


@pytest.mark.parametrize("name", ["int8", "bf16", "fp16"])
def test_what_is_not_finite_is_seen_by_all_ranks_and_does_not_stay_in_the_residuals(name):
    size, count = 3, 2000
    arrays = gradients(size, count)
    arrays[1][700] = np.inf
    arrays[2][1900] = np.nan
    residuals = [np.zeros(count, np.float32) for _ in range(size)]
    result = run(name, arrays, Sum, residuals)
    assert not np.isfinite(result[700]) and np.isnan(result[1900])
    assert np.isfinite(result[:512]).all()
    assert all(np.isfinite(array).all() for array in residuals)
    assert np.isfinite(run(name, gradients(size, count), Sum, residuals)).all()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_short_reads_and_small_links(name, size):
    arrays = gradients(size, 1111)
    expected = model(name, arrays, Sum).tobytes()
    for seed in range(4):
        faults = Faults(seed=seed, most_bytes=61, delay=0.05, most_turns=9)
        assert run(name, arrays, Sum, seed=seed, capacity_bytes=200, faults=faults).tobytes() == expected


@pytest.mark.parametrize("sending", [True, False])
def test_a_cut_link_is_an_error_or_harmless(sending):
    size = 3
    for offset in range(0, 900, 37):
        data = gradients(size, 1500)
        cut = Cut(0, 1, sending, offset)
        errors = simulate_coded(
            3, data, seed=offset, faults=Faults(seed=offset, cuts=(cut,)), capacity_bytes=128
        )
        assert all(error is None or isinstance(error, LinkClosed) for error in errors)
        assert errors[1 if sending else 0] is not None

# ---- several ranks per host ----------------------------------------------------------------------


GRIDS = [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]]
LEAST = 16384
"""The shortest vector that is added up inside the hosts first."""


def model_hosts(name, arrays, hosts, op):
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
def test_with_hosts_the_numbers_are_what_the_model_says(name, hosts):
    for count, op in ((LEAST, Sum), (LEAST + 5, Average), (3 * LEAST + 1, Average)):
        arrays = gradients(len(hosts), count)
        found = run(name, arrays, op, host_index=hosts)
        assert found.tobytes() == model_hosts(name, arrays, hosts, op).tobytes()


@pytest.mark.parametrize("op", [Sum, Average])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_with_hosts_what_was_delivered_and_the_residuals_are_the_sum_of_all_gradients(name, op):
    hosts, size, steps = [0, 0, 1, 1], 4, 8
    # Some are from the time when every rank exchanged with every other: they are delivered, not kept.
    residuals = [array * np.float32(1e-2) for array in gradients(size, LEAST, seed=99)]
    true = np.sum([array.astype(np.float64) for array in residuals], axis=0)
    delivered = np.zeros(LEAST)
    for step in range(steps):
        arrays = gradients(size, LEAST, seed=step)
        result = run(name, arrays, op, residuals, host_index=hosts).astype(np.float64)
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
