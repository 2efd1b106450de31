"""The arithmetic of weighted averages; the sum over ranks is the test's."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.weighted import weighted_average
from ringcomm.dtypes import dtype_named
from ringcomm.errors import Misuse, UnsupportedDtypeError
from ringcomm.ops import Average, Sum, op_name


class Runner:
    """Adds what the other ranks send: their weighted sums, and their weights behind them."""

    def __init__(self, *others):
        self.others = others
        self.calls = []

    def all_reduce(self, sums, op, name, shape, intent):
        self.calls.append((sums.copy(), op, name, shape, intent))
        with np.errstate(over="ignore"):
            for values, weight in self.others:
                sums += np.append(np.asarray(values, sums.dtype) * weight, weight).astype(sums.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_contributions_count_by_their_weights(dtype):
    data = np.array([1.0, 2.0], dtype)
    runner = Runner(([5.0, 10.0], 3.0))
    weighted_average(runner, data, 1.0, name="grad", shape=(1, 2))
    assert data.tolist() == [4.0, 8.0] and data.dtype == dtype
    ((sums, op, name, shape, intent),) = runner.calls
    assert sums.tolist() == [1.0, 2.0, 1.0], "the weight is one more element"
    assert (op, name, shape) == (Sum, "grad", (1, 2))
    assert op_name(intent.op) == "Average", "in texts"
    assert intent.name == "grad" and intent.text == "shape (1, 2), with a weight"


def test_data_of_weight_0_are_ignored_whatever_they_are():
    data = np.array([np.nan, np.inf], np.float32)
    weighted_average(Runner(([3.0, 4.0], 2)), data, 0)
    assert data.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_summed_in_float32(dtype):
    data = np.array([1.0], dtype_named(dtype))
    runner = Runner(([1.0], 70000.0))  # more than float16 can hold
    weighted_average(runner, data, 70000)
    assert runner.calls[0][0].dtype == np.float32
    assert data.astype(np.float64).tolist() == [1.0] and data.dtype == dtype_named(dtype)


def test_overflow_is_the_programs_and_no_warning(recwarn):
    data = np.array([3e38], np.float32)
    weighted_average(Runner(([3e38], 10.0)), data, 10.0)
    assert np.isinf(data).all() and not recwarn.list


def test_without_any_weight_there_is_no_average_and_the_data_stay():
    data = np.array([1.0, 2.0])
    with pytest.raises(Misuse, match=r"allreduce\(shape \(2,\), float64\): the weights of all ranks are 0"):
        weighted_average(Runner(([5.0, 6.0], 0.0)), data, 0.0, shape=(2,))
    assert data.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), "many", "3", None])
def test_what_is_no_weight_is_refused_before_anything_is_sent(weight):
    runner = Runner()
    with pytest.raises(Misuse, match="weight="):
        weighted_average(runner, np.zeros(2), weight)
    assert runner.calls == []


def test_other_reductions_and_whole_numbers_have_no_weights():
    runner = Runner()
    with pytest.raises(Misuse, match="no meaning with op=Sum"):
        weighted_average(runner, np.zeros(2), 1.0, op=Sum)
    for dtype in (np.int32, np.uint8, np.bool_):
        with pytest.raises(UnsupportedDtypeError, match="floating-point"):
            weighted_average(runner, np.zeros(2, dtype), 1.0, op=Average)
    assert runner.calls == []
