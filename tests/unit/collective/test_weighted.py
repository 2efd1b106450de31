"""The arithmetic of weighted averages; what the other ranks weigh is the test's."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.weighted import Total, apply_weight
from ringcomm.dtypes import dtype_named
from ringcomm.errors import Misuse, UnsupportedDtypeError
from ringcomm.ops import Average, Collective, Sum


class Runner:
    """Exchanges weights with ranks of these."""

    def __init__(self, *others):
        self.others = others
        self.size = 1 + len(others)
        self.calls = []

    def exchange(self, values, collective, dtype, name, shape, op, weighted):
        self.calls.append((collective, dtype, name, shape, op, weighted))
        weights = np.array([[other] for other in self.others], np.float64)
        return np.array([values, *weights.view(np.int64).tolist()])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_contributions_count_by_their_weights(dtype):
    data = np.array([1.0, 2.0], dtype_named(dtype))
    runner = Runner(3.0)
    weighted = apply_weight(runner, data, 1.0, name="grad", shape=(1, 2))
    assert weighted.astype(complex).tolist() == [0.5, 1.0], "relative to the mean of the weights"
    assert weighted is data if dtype != "float16" else weighted.dtype == np.float32
    assert runner.calls == [(Collective.ALLREDUCE, data.dtype, "grad", (1, 2), Average, True)]


def test_data_of_weight_0_are_ignored_whatever_they_are():
    data = np.array([np.nan, np.inf], np.float32)
    apply_weight(Runner(2), data, 0)
    assert data.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("weight", [1e308, 1e39, 70000, 3, 1e-46, 5e-324])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 49])
def test_equal_weights_change_no_bit_however_large_or_small_they_are(weight, count):
    for dtype in ("float16", "float32", "float64"):
        data = np.array([1.1, 6e4, 1e-7], dtype)
        before = data.tobytes()
        weighted = apply_weight(Runner(*[weight] * (count - 1)), data, weight)
        assert weighted.astype(dtype).tobytes() == data.tobytes() == before
    assert Total.of([weight] * count).share(weight, count) == 1.0


def test_weights_of_very_different_sizes():
    data = np.array([2.0], np.float32)
    apply_weight(Runner(1e300), data, 1e308)
    assert data.tolist() == [np.float32(4.0)]
    tiny = np.array([2.0], np.float32)
    apply_weight(Runner(1e308), tiny, 1e-308)
    assert tiny.tolist() == [0.0]


def test_sums_do_not_depend_on_the_order_of_ranks():
    weights = [0.1, 0.2, 0.3]
    total = Total.of(weights)
    assert total == Total.of(reversed(weights))
    assert total.part * 2.0**total.exponent == 0.6  # rounded once: 0.1 + 0.2 + 0.3 is 0.6000000000000001


def test_without_any_weight_there_is_no_average_and_the_data_stay():
    data = np.array([1.0, 2.0])
    with pytest.raises(Misuse, match=r"allreduce\(shape \(2,\), float64\): the weights of all ranks are 0"):
        apply_weight(Runner(0.0), data, 0.0, shape=(2,))
    assert data.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), "many", "3", None])
def test_what_is_no_weight_is_refused_before_anything_is_sent(weight):
    runner = Runner()
    with pytest.raises(Misuse, match="weight="):
        apply_weight(runner, np.zeros(2), weight)
    assert runner.calls == []


def test_other_reductions_and_whole_numbers_have_no_weights():
    runner = Runner()
    with pytest.raises(Misuse, match="no meaning with op=Sum"):
        apply_weight(runner, np.zeros(2), 1.0, op=Sum)
    for dtype in (np.int32, np.uint8, np.bool_):
        with pytest.raises(UnsupportedDtypeError, match="floating-point"):
            apply_weight(runner, np.zeros(2, dtype), 1.0, op=Average)
    assert runner.calls == []
