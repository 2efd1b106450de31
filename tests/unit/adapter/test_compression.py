"""Which gradients are compressed how; residuals by name."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm._adapter.compression import (
    Compression,
    Residuals,
    codec_for,
    compressor_of,
    is_elementwise,
)
from ringcomm.errors import ConfigError


@pytest.mark.parametrize("compression, dtype, shape, expected", [
    (Compression.none, "float32", (100, 100), "none"),
    (Compression.bf16, "float32", (100, 100), "none"),  # converted before, as one tensor
    (Compression.int8, "float32", (100, 100), "int8"),
    (Compression.int8, "float64", (8, 3, 20, 20), "int8"),
    (Compression.int8, "float32", (10000,), "bf16"),
    (Compression.int8, "float32", (10, 10), "bf16"),
    (Compression.int8, "int64", (100, 100), "none"),
    (Compression.int8, "float16", (100, 100), "none"),
    (Compression.int4, "float32", (64, 64), "int4"),
])  # fmt: skip
def test_what_is_compressed_how(compression, dtype, shape, expected):
    assert codec_for(compression, dtype, shape) == expected


def test_names():
    assert compressor_of("int8") is Compression.int8
    assert compressor_of(Compression.bf16) is Compression.bf16
    with pytest.raises(ConfigError, match="'int7': there are 'none', 'fp16'"):
        compressor_of("int7")
    assert is_elementwise(Compression.int4) and not is_elementwise(object())


class TestResiduals:
    def test_buckets_that_are_made_anew_keep_what_belongs_to_a_name(self):
        residuals = Residuals()
        whole = residuals.side_by_side(["a", "b"], [3, 2], [0, 4], 8)
        whole[:3], whole[4:6] = 1, 2
        assert residuals.of("a", 3).tolist() == [1, 1, 1]
        again = residuals.side_by_side(["b", "c"], [2, 1], [0, 2], 3)
        assert again.tolist() == [2, 2, 0]
        again[:] = 5
        assert residuals.of("b", 2).tolist() == [5, 5] and residuals.of("a", 3).tolist() == [1, 1, 1]

    def test_saving_and_loading(self):
        residuals, other = Residuals(), Residuals()
        residuals.of("a", 2)[:] = 3
        mine = other.of("a", 2)
        other.of("b", 1)[:] = 9
        other.load(residuals.state())
        assert mine.tolist() == [3, 3] and other.of("b", 1).tolist() == [0]
        fresh = Residuals()
        fresh.load(residuals.state())
        assert fresh.of("a", 2).tolist() == [3, 3]
        residuals.of("a", 2)[:] = 4
        assert fresh.of("a", 2).tolist() == [3, 3], "a checkpoint must be a copy"

    def test_scaling_and_forgetting(self):
        residuals = Residuals()
        residuals.of("a", 2)[:] = 3
        residuals.of("b", 1)[:] = 4
        residuals.scale(0.5)
        found = {name: array.tolist() for name, array in residuals.state().items()}
        assert found == {"a": [1.5, 1.5], "b": [2]}
        residuals.drop(["a", "never there"])
        assert list(residuals.state()) == ["b"] and residuals.of("a", 2).tolist() == [0, 0]
        assert residuals.clear() == 1 and residuals.clear() == 0


def test_decompression_restores_the_dtype():
    numbers = np.array([0.5, 1.25], np.float64)
    small, context = Compression.fp16.compress(numbers)
    assert small.dtype == np.float16
    whole = Compression.fp16.decompress(small, context)
    assert whole.dtype == np.float64 and whole.tolist() == [0.5, 1.25]
    counts = np.array([1, 2])
    for compression in (Compression.none, Compression.fp16, Compression.bf16):
        assert is_elementwise(compression)
        assert compression.compress(counts) == (counts, None)
        assert compression.decompress(counts, None) is counts
    assert not is_elementwise(type("Own", (Compression.fp16,), {}))
