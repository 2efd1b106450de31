"""Codecs against models of the same arithmetic in float64, for all lengths."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.codec.codecs import BLOCK_ITEMS, SEGMENT_ITEMS, make_codec

LENGTHS = [0, 1, 255, 256, 257, 4000, SEGMENT_ITEMS]
QUANTIZED = {"int8": 127, "int4": 7}


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def coded(name, values):
    codec = make_codec(name)
    values = np.asarray(values, np.float32)
    codes = np.full(codec.encoded_bytes(values.size), 0xAB, np.uint8)
    kept, decoded = np.full(values.size, 7, np.float32), np.full(values.size, 9, np.float32)
    finite = codec.encode(values, codes, kept)
    codec.decode(codes, decoded)
    assert kept.tobytes() == decoded.tobytes(), "the encoding rank would use other numbers than the others"
    return decoded, finite, codes


def numbers(count, seed=0):
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(count) * 10.0 ** generator.uniform(-6, 3, count)).astype(np.float32)


def scales_of(values, levels):
    """Per value, the scale of its block in float64."""
    padded = np.zeros(-(-values.size // BLOCK_ITEMS) * BLOCK_ITEMS)
    padded[: values.size] = np.abs(values)
    return np.repeat(padded.reshape(-1, BLOCK_ITEMS).max(axis=1) / levels, BLOCK_ITEMS)[: values.size]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_error_is_at_most_half_a_scale(name, length):
    values = numbers(length)
    decoded, finite, _ = coded(name, values)
    scales = scales_of(values, QUANTIZED[name])
    assert finite
    assert np.all(np.abs(decoded.astype(np.float64) - values) <= scales * (0.5 + 1e-4))


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_stay_zero_and_are_positive(name):
    values = numbers(1000)
    values[::3] = 0
    values[256:512] = 0
    values[300:310] = -0.0
    decoded, finite, _ = coded(name, values)
    assert finite
    assert not decoded[::3].any() and not decoded[256:512].any()
    assert not np.signbit(decoded[decoded == 0]).any()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_not_finite_poisons_its_block_and_no_other(name, bad):
    values = numbers(1100)
    values[600] = bad
    values[1099] = bad
    decoded, finite, _ = coded(name, values)
    assert not finite
    poisoned = np.isnan(decoded)
    assert poisoned[512:768].all() and poisoned[1024:].all()
    assert not poisoned[:512].any() and not poisoned[768:1024].any()
    assert len(np.unique(decoded[poisoned].view(np.uint32))) == 1


@pytest.mark.parametrize("length", LENGTHS)
def test_bf16_rounds_to_the_nearest_even(length):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(5).integers(0, 2**32, length, dtype=np.uint32)
    bits[::7] &= 0xFFFF0000
    bits[1::7] = bits[1::7] & 0xFFFF0000 | 0x8000  # ties
    values = bits.view(np.float32)
    decoded, finite, _ = coded("bf16", values)
    model = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    nans = np.isnan(values)
    assert np.array_equal(nans, np.isnan(decoded))
    assert decoded[~nans].tobytes() == model[~nans].tobytes()
    assert finite == bool(np.isfinite(values).all())
    assert len(np.unique(decoded[nans].view(np.uint32))) <= 1


@pytest.mark.parametrize("length", LENGTHS)
def test_fp16_rounds_as_numpy_does(length):
    values = numbers(length) * 100
    decoded, finite, _ = coded("fp16", values)
    model = values.astype(np.float16).astype(np.float32)
    assert decoded.tobytes() == model.tobytes()
    assert finite == bool(np.isfinite(model).all())


@pytest.mark.parametrize("bits", [0x7F7F7FFF, 0x7F7F8000, 0x7F800000])
def test_bf16_reports_what_rounds_to_infinity(bits):
    decoded, finite, _ = coded("bf16", np.array([bits], np.uint32).view(np.float32))
    assert finite == bool(np.isfinite(decoded[0])) == (bits < 0x7F7F8000)


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "int4"])
def test_nothing_is_allocated_per_segment(name):
    import tracemalloc

    codec = make_codec(name)
    values = numbers(SEGMENT_ITEMS)
    codes, decoded = np.empty(codec.encoded_bytes(values.size), np.uint8), np.empty_like(values)
    codec.encode(values, codes, decoded)
    tracemalloc.start()
    try:
        codec.encode(values, codes, decoded)
        codec.decode(codes, decoded)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # NumPy's broadcasting multiplication takes a buffer of 8192 elements.
    assert peak < 40_000, f"{peak} bytes for a segment of {values.nbytes}"
