"""`compression=` through the public calls, on ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

import ringcomm
from ringcomm._adapter.compression import Compression, configured
from ringcomm.config import Settings
from ringcomm.ops import Average, Max, Sum
from ringcomm.testing.cluster import errors_of, run_ranks

CODECS = ["fp16", "bf16", "int8", "int4"]
TOLERANCE = {"fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2, "int4": 0.35}


def numbers(rank, *shape):
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("size", "transport"), [(1, "memory"), (3, "unix"), (5, "auto")])
def test_every_codec(size, transport):
    def work(context):
        array = numbers(context.rank, 70, 1000)
        return [context.allreduce(array, compression=codec) for codec in CODECS]

    results = run_ranks(size, work, transport=transport)
    exact = np.mean([numbers(rank, 70, 1000) for rank in range(size)], axis=0)
    for index, codec in enumerate(CODECS):
        assert len({result[index].tobytes() for result in results}) == 1
        assert np.abs(results[0][index] - exact).max() <= TOLERANCE[codec] * (size > 1)


def test_in_place_and_other_types():
    def work(context):
        mine, doubles, whole = (
            numbers(context.rank, 500),
            numbers(context.rank, 500).astype(float),
            np.arange(9),
        )
        context.allreduce_(mine, Sum, compression="int8")
        return (
            mine, context.allreduce(doubles, Sum, compression="int8"),
            context.allreduce(whole, Sum, compression="int8"),
            context.allreduce(numbers(context.rank, 50), Max, compression="int8"),
        )  # fmt: skip

    (mine, doubles, whole, greatest), other = run_ranks(2, work)
    exact = numbers(0, 500) + numbers(1, 500)
    assert np.abs(mine - exact).max() < 0.1 and doubles.dtype == np.float64
    assert doubles.astype(np.float32).tobytes() == mine.tobytes()
    assert whole.tolist() == (2 * np.arange(9)).tolist()
    assert greatest.tobytes() == np.maximum(numbers(0, 50), numbers(1, 50)).tobytes()
    assert [array.tobytes() for array in other] == [
        array.tobytes() for array in (mine, doubles, whole, greatest)
    ]


@pytest.mark.parametrize("other", [None, "bf16"])
def test_ranks_that_disagree_are_told_what_about(other):
    def work(context):
        context.allreduce(numbers(0, 4096), compression="int8" if context.rank else other)

    for error in errors_of(2, work):
        assert "they disagree about the compression" in str(error)
        assert "compression='int8'" in str(error)


class TestByName:
    """The asynchronous calls, which the engine fuses."""

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_fused_tensors_of_different_magnitudes(self, size):
        def work(context):
            engine = context.engine
            arrays = [numbers(context.rank, 700) * 10.0**place for place in range(-3, 3)]
            arrays = [array.astype(np.float32) for array in arrays]
            handles = [
                engine.allreduce([array], Average, f"t{place}", compression="int8")
                for place, array in enumerate(arrays)
            ]
            plain = engine.allreduce([np.ones(3, np.float32)], Sum, "plain")
            for handle in handles:
                handle.wait()
            plain.wait()
            return arrays

        results = run_ranks(size, work)
        for place in range(6):
            exact = np.mean([numbers(rank, 700) * 10.0 ** (place - 3) for rank in range(size)], axis=0)
            assert len({result[place].tobytes() for result in results}) == 1
            # A block of another tensor would make this one coarse.
            assert np.abs(results[0][place] - exact).max() < 0.03 * 10.0 ** (place - 3)

    @pytest.mark.parametrize("count", [1, 3])
    def test_residuals(self, count):
        steps, length = 10, 900

        def gradient(rank, step, place):
            return np.random.default_rng((rank, step, place)).standard_normal(length).astype(np.float32)

        def work(context):
            residuals = [np.zeros(length, np.float32) for _ in range(count)]
            delivered = np.zeros((count, length))
            for step in range(steps):
                arrays = [gradient(context.rank, step, place) for place in range(count)]
                context.engine.allreduce(arrays, Sum, "g", compression="int4", residuals=residuals).wait()
                delivered += arrays
            return delivered, residuals

        results = run_ranks(3, work)
        true = np.sum(
            [
                [gradient(rank, step, place) for place in range(count)]
                for rank in range(3) for step in range(steps)
            ],
            axis=0, dtype=np.float64,
        )  # fmt: skip
        left = np.sum([residuals for _, residuals in results], axis=0, dtype=np.float64)
        assert np.abs(left).max() > 0.01
        assert np.abs(results[0][0] + left - true).max() < 1e-4


@pytest.mark.parametrize("setting, passed, expected", [
    ("int8", Compression.none, Compression.int8), ("int8", "none", Compression.none),
    ("int8", Compression.bf16, Compression.bf16), ("", Compression.none, Compression.none),
])  # fmt: skip
def test_the_setting_counts_where_the_program_names_no_compression(setting, passed, expected):
    ringcomm.init(settings=Settings(compression=setting))
    try:
        assert configured(passed, ringcomm.global_process_set) is expected
    finally:
        ringcomm.shutdown()
