"""Element types: codes on the wire, what may be reduced, what sums are kept in."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.dtypes import accumulator, check_reducible, check_scalable, code_of, name_of_code
from ringcomm.errors import UnsupportedDtypeError
from ringcomm.ops import ReduceOp
from tests.support.reference import ELEMENTWISE

CODES = {
    "bool": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "uint32": 6, "int32": 7, "uint64": 8,
    "int64": 9, "float16": 10, "float32": 11, "float64": 12, "complex64": 13, "complex128": 14,
    "bfloat16": 15,
}  # fmt: skip
INTEGERS = [name for name in CODES if "int" in name]
MIN_OR_MAX = (ReduceOp.MIN, ReduceOp.MAX)


def dtype(name):
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


@pytest.mark.parametrize("name, code", CODES.items())
def test_codes_never_change(name, code):
    assert code_of(dtype(name)) == code
    assert name_of_code(code) == name


def test_byte_order_is_not_part_of_the_code():
    assert code_of(np.dtype(">f4")) == code_of(np.dtype("<f4"))


@pytest.mark.parametrize("code", [0, 16, -1, 255])
def test_unknown_code(code):
    with pytest.raises(KeyError):
        name_of_code(code)


@pytest.mark.parametrize("name", ["U3", "S3", "O", "datetime64[s]", "timedelta64[s]", "V8", "f4,i4"])
def test_what_cannot_travel_is_told_what_can(name):
    with pytest.raises(UnsupportedDtypeError, match="bfloat16.*broadcast_object"):
        code_of(np.dtype(name))


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("op", list(ELEMENTWISE))
def test_reducible(name, op):
    meaningless = (name == "bool" and op == ReduceOp.AVERAGE) or (
        name.startswith("complex") and op not in (ReduceOp.AVERAGE, ReduceOp.SUM)
    )
    if meaningless:
        with pytest.raises(UnsupportedDtypeError):
            check_reducible(dtype(name), op)
    else:
        check_reducible(dtype(name), op)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("op", list(ELEMENTWISE))
@pytest.mark.parametrize("scaled", [False, True])
def test_accumulator(name, op, scaled):
    expected = None
    if name in ("float16", "bfloat16") and (scaled or op not in MIN_OR_MAX):
        expected = np.float32
    elif name in INTEGERS and (scaled or op == ReduceOp.AVERAGE):
        expected = np.float64
    assert accumulator(dtype(name), op, scaled) == (None if expected is None else np.dtype(expected))


@pytest.mark.parametrize("name", CODES)
def test_all_but_booleans_can_be_scaled(name):
    if name == "bool":
        with pytest.raises(UnsupportedDtypeError, match="no meaning for booleans"):
            check_scalable(dtype(name))
    else:
        check_scalable(dtype(name))
