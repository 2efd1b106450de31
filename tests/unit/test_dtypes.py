"""Element types: codes on the wire, what may be reduced, what sums are kept in."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.dtypes import accumulator, check_reducible, check_scalable, code_of, name_of_code
from ringcomm.errors import UnsupportedDtypeError
from ringcomm.ops import ReduceOp
from tests.support.reference import ELEMENTWISE, all_dtypes, ops_for

CODES = {
    "bool": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "uint32": 6, "int32": 7, "uint64": 8,
    "int64": 9, "float16": 10, "float32": 11, "float64": 12, "complex64": 13, "complex128": 14,
    "bfloat16": 15,
}  # fmt: skip
MIN_OR_MAX = (ReduceOp.MIN, ReduceOp.MAX)


def test_codes_never_change():
    for dtype in all_dtypes():
        assert code_of(dtype) == CODES[dtype.name] and name_of_code(CODES[dtype.name]) == dtype.name
    assert code_of(np.dtype(">f4")) == code_of(np.dtype("<f4"))
    for code in (0, 16, -1, 255):
        with pytest.raises(KeyError):
            name_of_code(code)


@pytest.mark.parametrize("name", ["U3", "O", "datetime64[s]", "V8", "f4,i4"])
def test_what_cannot_travel_is_told_what_can(name):
    with pytest.raises(UnsupportedDtypeError, match="bfloat16.*broadcast_object"):
        code_of(np.dtype(name))


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_what_may_be_reduced_and_in_which_type(dtype):
    for op in ELEMENTWISE:
        if op in ops_for(dtype):
            check_reducible(dtype, op)
        else:
            with pytest.raises(UnsupportedDtypeError):
                check_reducible(dtype, op)
        for scaled in (False, True):
            expected = None
            if dtype.name in ("float16", "bfloat16") and (scaled or op not in MIN_OR_MAX):
                expected = np.dtype(np.float32)
            elif dtype.kind in "iu" and (scaled or op == ReduceOp.AVERAGE):
                expected = np.dtype(np.float64)
            assert accumulator(dtype, op, scaled) == expected
    if dtype.kind == "b":
        with pytest.raises(UnsupportedDtypeError, match="no meaning for booleans"):
            check_scalable(dtype)
    else:
        check_scalable(dtype)
