"""Element types: codes on the wire, what may be reduced, what sums are kept in."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.dtypes import code_of, name_of_code
from ringcomm.errors import UnsupportedDtypeError
from tests.support.reference import all_dtypes

CODES = {
    "bool": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "uint32": 6, "int32": 7, "uint64": 8,
    "int64": 9, "float16": 10, "float32": 11, "float64": 12, "complex64": 13, "complex128": 14,
    "bfloat16": 15,
}  # fmt: skip


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
