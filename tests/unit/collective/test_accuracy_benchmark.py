"""The accuracy benchmark averages as the executor does, and its test of equivalence can say no."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ringcomm.ops import CODECS, Average
from tests.support.simulation import simulate_coded

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from accuracy import compared  # noqa: E402
from peers.averaging import coded_average  # noqa: E402


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_it_averages_with_the_bits_of_the_executor(name):
    workers, count = 4, 3000
    mine = [np.zeros(count, np.float32) for _ in range(workers)]
    theirs = [np.zeros(count, np.float32) for _ in range(workers)]
    for step in range(3):
        data = [
            np.random.default_rng((step, worker)).standard_normal(count).astype(np.float32)
            for worker in range(workers)
        ]
        result = coded_average(name, [item.copy() for item in data], mine)
        simulate_coded(CODECS.index(name), data, seed=1, op=Average, residuals=theirs)
        assert result.tobytes() == data[0].tobytes()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs))


@pytest.mark.parametrize("differences, equivalent", [
    ([0.1, -0.1, 0.2, -0.2, 0.0], True), ([-1.0, -0.9, -1.1, -1.0, -1.0], False),
    ([2.0, -2.0, 2.0, -2.0, 0.0], False),  # too uncertain to claim anything
])  # fmt: skip
def test_equivalence_is_claimed_only_within_the_margin(differences, equivalent):
    reference = [90.0] * len(differences)
    assert compared([90 + item for item in differences], reference).equivalent is equivalent
