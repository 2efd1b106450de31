"""Which gradients are compressed how; residuals by name; PowerSGD's arithmetic."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ringcomm._adapter.compression import (
    Compression,
    PowerSGD,
    codec_for,
    compressor_of,
    is_elementwise,
)
from ringcomm._adapter.feedback import Residuals
from ringcomm._adapter.powersgd import Matrix, PowerIteration, multiply, orthogonalize, total
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
    (PowerSGD(4), "float32", (100, 100), "powersgd"),
    (PowerSGD(4), "float32", (64, 3, 7, 7), "powersgd"),
    (PowerSGD(4), "float32", (10, 10), "bf16"),
    (PowerSGD(4), "float64", (100, 100), "bf16"),
    (PowerSGD(4), "float32", (100,), "bf16"),
    (PowerSGD(4), "float32", (0, 100), "bf16"),
])  # fmt: skip
def test_what_is_compressed_how(compression, dtype, shape, expected):
    assert codec_for(compression, dtype, shape) == expected


def test_names():
    assert compressor_of("int8") is Compression.int8
    assert compressor_of(Compression.bf16) is Compression.bf16
    with pytest.raises(ConfigError, match="'int7': there are 'none', 'fp16'"):
        compressor_of("int7")
    with pytest.raises(ConfigError, match="rank of 1 or more"):
        PowerSGD(0)
    assert is_elementwise(PowerSGD(2)) and is_elementwise(Compression.int4) and not is_elementwise(object())


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

    def test_one_of_another_size_starts_with_zeros(self):
        residuals = Residuals()
        mine = residuals.of("a", 2)
        mine[:] = 3
        residuals.load({"a": np.ones(3, np.float32), "b": np.ones((2, 2))})
        assert mine.tolist() == [0, 0] and residuals.of("b", 4).tolist() == [1, 1, 1, 1]
        assert residuals.of("b", 3).tolist() == [0, 0, 0]

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

    def test_dropping_is_logged_once(self, caplog):
        residuals = Residuals()
        residuals.of("a", 2)[:] = 3
        with caplog.at_level(logging.INFO):
            residuals.reset("a state was loaded")
            residuals.reset("a state was loaded")
        assert [item.getMessage() for item in caplog.records] == [
            "error feedback of 1 parameters is dropped: a state was loaded"
        ]


class TestPowerSGD:
    def matrices(self, size, seed=0):
        generator = np.random.default_rng(seed)
        return [generator.standard_normal((40, 30)).astype(np.float32) for _ in range(size)]

    def step(self, iterations, gradients):
        """One step of all ranks in one process."""
        own = [[gradient.reshape(-1).copy()] for gradient in gradients]
        for side in ("left", "right"):
            for iteration, mine in zip(iterations, own):
                if side == "left":
                    iteration.add_residuals(mine)
                    iteration.make_left(mine)
                else:
                    iteration.make_right(mine)
            mean = np.mean([getattr(iteration, side) for iteration in iterations], axis=0, dtype=np.float32)
            for iteration in iterations:
                getattr(iteration, side)[:] = mean
        for iteration, mine in zip(iterations, own):
            iteration.finish(mine)
        assert len({mine[0].tobytes() for mine in own}) == 1
        return own[0][0].reshape(40, 30)

    def make(self, size, rank=4):
        kept = [Residuals() for _ in range(size)]
        return kept, [PowerIteration([Matrix("w", 40, 30)], rank, item) for item in kept]

    def test_a_matrix_of_low_rank_is_exact_after_warm_start(self):
        generator = np.random.default_rng(1)
        low = (generator.standard_normal((40, 2)) @ generator.standard_normal((2, 30))).astype(np.float32)
        _, iterations = self.make(2)
        assert np.allclose(self.step(iterations, [low, low]), low, atol=1e-4)

    def test_what_was_delivered_and_the_residuals_are_all_gradients(self):
        kept, iterations = self.make(3)
        delivered, true = np.zeros((40, 30)), np.zeros((40, 30))
        for seed in range(8):
            gradients = self.matrices(3, seed)
            delivered += self.step(iterations, gradients).astype(float) * 3
            true += np.sum(gradients, axis=0, dtype=float)
        left = np.sum([item.of("w", 1200) for item in kept], axis=0, dtype=float).reshape(40, 30)
        assert np.abs(left).max() > 1
        assert np.abs(delivered + left - true).max() < 1e-3

    def test_repetition_finds_the_greatest_singular_values(self):
        _, iterations = self.make(1)
        (matrix,) = self.matrices(1)
        for iteration in iterations:
            for _ in range(60):
                iteration._residuals.reset("test")
                found = self.step([iteration], [matrix])
        u, s, v = np.linalg.svd(matrix)
        best = (u[:, :4] * s[:4]) @ v[:4]
        assert np.linalg.norm(matrix - found) < 1.02 * np.linalg.norm(matrix - best)

    def test_an_overflow_is_visible_and_is_over_with_the_step(self):
        kept, iterations = self.make(2)
        bad = self.matrices(2)
        bad[1][3, 3] = np.inf
        with np.errstate(all="ignore"):
            assert not np.isfinite(self.step(iterations, bad)).all()
        assert np.isfinite(self.step(iterations, self.matrices(2))).all()
        assert all(np.isfinite(item.of("w", 1200)).all() for item in kept)

    def test_zeros(self):
        _, iterations = self.make(2)
        zeros = [np.zeros((40, 30), np.float32)] * 2
        assert not self.step(iterations, zeros).any()

    @pytest.mark.parametrize("name", [f"w{number}" for number in range(8)])
    def test_a_matrix_of_lower_rank_than_the_factors(self, name):
        """Columns that depend on each other must not count twice."""
        gradients = [np.ones(70 * 80, np.float32)]
        iteration = PowerIteration([Matrix(name, 70, 80)], 4, Residuals())
        for _ in range(3):
            gradients[0][:] = 1.0
            iteration.add_residuals(gradients)
            iteration.make_left(gradients)
            iteration.make_right(gradients)
            iteration.finish(gradients)
            assert np.abs(gradients[0] - 1.0).max() < 1e-5

    def test_orthonormal(self):
        vectors = np.random.default_rng(0).standard_normal((4, 101)).astype(np.float32)
        vectors[3] = vectors[2] * 2 + 1e-3 * vectors[3]
        orthogonalize(vectors)
        assert np.abs(vectors @ vectors.T - np.eye(4)).max() < 1e-4

    @pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 1000, 1001])
    def test_sums_in_a_fixed_order(self, count):
        values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        # The same additions one by one.
        current, rest = list(values), []
        while len(current) > 1:
            half = len(current) // 2
            if len(current) % 2:
                rest.append(current[-1])
            current = [np.float32(current[i] + current[half + i]) for i in range(half)]
        expected = current[0] if current else np.float32(0)
        for value in rest:
            expected = np.float32(expected + value)
        assert total(values).tobytes() == np.float32(expected).tobytes()

    def test_products_are_sums_in_the_order_of_the_rows(self):
        generator = np.random.default_rng(2)
        left, right = (generator.standard_normal((3, n)).astype(np.float32) for n in (50, 2000))
        out = np.empty((50, 2000), np.float32)
        multiply(left, right, out)
        expected = left[0][:, None] * right[0]
        for index in (1, 2):
            expected = expected + left[index][:, None] * right[index]
        assert out.tobytes() == expected.tobytes()
