"""All-reduce with a codec: the numbers against models, the same bits, error feedback, faults."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.codec.codecs import BLOCK_ITEMS, SEGMENT_ITEMS, make_codec
from ringcomm.dtypes import usable_codec
from ringcomm.ops import CODECS, Average, Max, Min, Product, Sum
from ringcomm.schedule.select import Selector
from ringcomm.testing.faulty import Cut, Faults
from ringcomm.transport.base import LinkClosed
from tests.support.simulation import simulate_coded

SIZES = [2, 3, 4, 7, 9]
NAMES = CODECS[1:]
QUANTIZED = {"int8": 127, "int4": 7}
LONG = SEGMENT_ITEMS * 2 + 777


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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_several_segments(name, size):
    arrays = gradients(size, LONG * size)
    assert run(name, arrays, Average).tobytes() == model(name, arrays, Average).tobytes()


@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_error_is_half_a_scale_per_quantization(name, size):
    """Against sums in float64: each contribution but the owner's is quantized once, and the result once."""
    count = 5000
    arrays = gradients(size, count)
    result = run(name, arrays, Sum).astype(np.float64)
    exact = np.sum([array.astype(np.float64) for array in arrays], axis=0)
    bounds = Selector(0, size).coded_bounds(count, BLOCK_ITEMS)
    allowed = np.zeros(count)

    def half_scale(values):
        greatest = np.maximum.reduceat(np.abs(values), np.arange(0, values.size, BLOCK_ITEMS))
        return np.repeat(greatest / QUANTIZED[name] / 2, BLOCK_ITEMS)[: values.size]

    for owner, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        if start < stop:
            sent = [half_scale(array[start:stop]) for rank, array in enumerate(arrays) if rank != owner]
            allowed[start:stop] = np.sum(sent, axis=0)
            # The sum that is quantized differs from the exact one by what was lost before.
            levels = QUANTIZED[name]
            spread = np.maximum.reduceat(allowed[start:stop], np.arange(0, stop - start, BLOCK_ITEMS))
            allowed[start:stop] += half_scale(exact[start:stop])
            allowed[start:stop] += np.repeat(spread / levels / 2, BLOCK_ITEMS)[: stop - start]
    assert np.all(np.abs(result - exact) <= allowed * (1 + 1e-3) + 1e-12)


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


@pytest.mark.parametrize("dtype, op, expected", [
    (np.float32, Sum, 3), (np.float64, Average, 3), (np.float16, Sum, 3), (np.int32, Sum, 0),
    (np.float32, Min, 0), (np.float32, Max, 0), (np.float32, Product, 0), (np.complex64, Sum, 0),
])  # fmt: skip
def test_what_is_never_compressed(dtype, op, expected):
    assert usable_codec(3, np.dtype(dtype), op) == expected
