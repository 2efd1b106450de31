"""The arithmetic of reductions: values, types, rounding, and bits."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from ringcomm.collective.reduce import Kernel
from ringcomm.errors import UnsupportedDtypeError
from ringcomm.ops import Average, Bitwise, Max, Min, Product, ReduceOp, Sum
from tests.support.reference import all_dtypes, assert_reduced, contributions, hard_bits, ops_for

DTYPES = all_dtypes()
FLOATS = [dtype for dtype in DTYPES if dtype.kind not in "biu"]
INTEGERS = [dtype for dtype in DTYPES if dtype.kind in "iu"]


def name_of(value):
    return value.name if isinstance(value, (np.dtype, ReduceOp)) else None


OPS_AND_DTYPES = [(op, dtype) for dtype in DTYPES for op in ops_for(dtype)]


def fold(kernel, arrays):
    """The final fold of copies of the arrays, into the first of them."""
    operands = [np.array(array) for array in arrays]
    for operand in operands:
        kernel.prepare(operand)
    kernel.fold(operands[0], operands, final=True)
    return operands[0]


def total(values, op, dtype, **scales):
    """The reduction of numbers, one from each rank."""
    arrays = [np.array([value], dtype) for value in values]
    return fold(Kernel(op, np.dtype(dtype), len(arrays), **scales), arrays)[0]


class TestFolds:
    @pytest.mark.parametrize(("op", "dtype"), OPS_AND_DTYPES, ids=name_of)
    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_every_op_and_dtype_wherever_the_own_contribution_stands(self, op, dtype, size):
        arrays = contributions(dtype, size, 33)
        results = set()
        for position in range(size):
            operands = [array.copy() for array in arrays]
            out = operands[position]
            Kernel(op, dtype, size).fold(out, operands, final=True)
            assert_reduced(out, arrays, op)
            results.add(out.tobytes())
        assert len(results) == 1

    def test_operands_are_taken_from_left_to_right(self):
        values = np.array([1e8, 1.0, -1e8, 3.0], np.float32)
        for order in permutations(values):
            expected = np.float32(0)
            for value in order:
                expected = np.float32(expected + value)
            assert total(order, Sum, np.float32) == expected


class TestIntegers:
    @pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
    def test_the_sum_behind_an_average_does_not_wrap(self, dtype):
        high = np.iinfo(dtype).max - 27
        expected = high if dtype.itemsize < 8 else pytest.approx(float(high), rel=1e-15)
        assert total([high] * 9, Average, dtype) == expected

    @pytest.mark.parametrize(
        ("values", "expected"),
        [([100, 100], 100), ([1, 2], 1), ([-1, -2], -1), ([-1, 0], 0), ([-7, 0, 0], -2), ([5, 6, 6], 5)],
    )
    def test_averages_truncate_toward_zero(self, values, expected):
        for dtype in (np.int8, np.int16, np.int32, np.int64):
            assert total(values, Average, dtype) == expected

    @pytest.mark.parametrize("ranks", range(2, 65))
    def test_the_average_of_equal_integers_is_that_integer(self, ranks):
        assert total([1] * ranks, Average, np.int32) == 1  # 49 * (1 / 49) is less than 1

    def test_sums_without_scale_wrap_as_in_numpy(self):
        assert total([100, 100], Sum, np.int8) == -56
        assert total([200, 100], Sum, np.uint8) == 44

    @pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
    @pytest.mark.parametrize("scales", [{"prescale": 3e9}, {"postscale": 3e19}], ids=str)
    def test_scaled_numbers_that_do_not_fit_stop_at_the_limit(self, dtype, scales):
        info = np.iinfo(dtype)
        for value, limit in ((3, info.max), (-3, info.min)):
            if value >= info.min:
                expected = pytest.approx(float(limit), rel=1e-15)
                if dtype.itemsize == 8 and "prescale" in scales:
                    value *= 10**10
                assert float(total([value, value], Sum, dtype, **scales)) == expected


class TestFloats:
    @pytest.mark.parametrize("dtype", FLOATS[:1] + FLOATS[-1:], ids=name_of)
    def test_half_sums_are_rounded_once(self, dtype):
        # One large number and many small ones, each of which alone would be lost in rounding.
        values = np.array([64.0] + [0.015625] * 512, dtype)
        assert float(total(values, Sum, dtype)) == 72.0
        assert total(values[:9] * 0 + values[8], Average, dtype) == values[8]

    @pytest.mark.parametrize("dtype", FLOATS[:1] + FLOATS[-1:], ids=name_of)
    def test_nan_of_a_scale_factor_has_the_same_bits_as_any_other(self, dtype):
        with np.errstate(all="ignore"):
            found = total([np.inf, 1], Sum, dtype, postscale=0.0)  # the sign is the processor's
        assert np.asarray(found).tobytes() == np.array(np.nan, dtype).tobytes()

    def test_scale_factors(self):
        for dtype in FLOATS:
            assert complex(total([1.0, 2.0], Sum, dtype, prescale=0.5)) == 1.5
            assert complex(total([1.0, 2.0], Sum, dtype, postscale=4.0)) == 12.0
            assert complex(total([1.0, 3.0], Average, dtype, prescale=2.0, postscale=0.5)) == 2.0

    @pytest.mark.parametrize("op", [Average, Sum, Min, Max, Product], ids=name_of)
    def test_nan_and_infinity_come_through(self, op):
        for dtype in FLOATS:
            if op in ops_for(dtype):
                with np.errstate(invalid="ignore"):
                    assert np.isnan(complex(total([1.0, np.nan, 2.0], op, dtype)))
                    assert np.isnan(complex(total([np.nan, 1.0, 2.0], op, dtype)))
        assert total([1.0, np.inf], Max, np.float32) == np.inf
        assert total([1.0, -np.inf], Sum, np.float32) == -np.inf


def test_booleans():
    """Any and all; averages and scale factors are refused."""
    for op, values, expected in (
        (Sum, [True, True], True), (Sum, [False, False], False), (Max, [False, True], True),
        (Min, [False, True], False), (Product, [True, True], True), (Product, [True, False], False),
    ):  # fmt: skip
        assert total(values, op, np.bool_) == expected
    with pytest.raises(UnsupportedDtypeError, match="average of booleans"):
        Kernel(Average, np.dtype(bool), 2)
    with pytest.raises(UnsupportedDtypeError, match="scale_factor"):
        Kernel(Sum, np.dtype(bool), 2, prescale=2.0)


class TestBitwise:
    @pytest.mark.parametrize(
        ("op", "whole", "flag"),
        [(Bitwise.BAND, 0b1000, False), (Bitwise.BOR, 0b1111, True), (Bitwise.BXOR, 0b0011, False)],
    )
    @pytest.mark.parametrize("dtype", [np.uint8, np.int64])
    def test_integers_and_booleans(self, op, whole, flag, dtype):
        assert total([0b1100, 0b1010, 0b1101, 0b1000], op, dtype) == whole
        assert total([True, True, False, False], op, np.bool_) == flag

    @pytest.mark.parametrize("dtype", [np.float32])
    def test_other_elements_are_refused(self, dtype):
        with pytest.raises(UnsupportedDtypeError, match="bitwise reductions need integers or booleans, not"):
            Kernel(Bitwise.BXOR, np.dtype(dtype), 2)


class TestOneRank:
    def test_the_result_is_the_contribution(self):
        for op, dtype in OPS_AND_DTYPES:
            (array,) = contributions(dtype, 1, 20)
            data = array.copy()
            Kernel(op, dtype, 1).finish_alone(data)
            assert data.tobytes() == array.tobytes(), (op, dtype)
        large = np.array([2**60 + 1], np.int64)
        Kernel(Average, large.dtype, 1).finish_alone(large)
        assert large == [2**60 + 1]


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("seed", range(2))
def test_final_bits_depend_on_nothing_but_the_numbers(dtype, seed):
    """Not on alignment, on where the own contribution stands, or on how a message was cut up."""
    size, count = 3, 67
    arrays = [hard_bits(dtype, count, (seed, rank)) for rank in range(size)]
    for op in ops_for(dtype):
        kernel = Kernel(op, dtype, size)
        results = set()
        for position in range(size):
            for piece in (1, 5, count):
                operands = [np.empty(count + rank + 1, dtype)[rank + 1 :] for rank in range(size)]
                for operand, array in zip(operands, arrays):
                    operand[...] = array
                out = operands[position]
                with np.errstate(all="ignore"):
                    for start in range(0, count, piece):
                        cut = slice(start, start + piece)
                        kernel.fold(out[cut], [operand[cut] for operand in operands], final=True)
                results.add(out.tobytes())
        assert len(results) == 1, f"seed {seed}: {op.name} of {dtype.name}"
