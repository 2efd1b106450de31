"""The suite for kinds of arrays, on arrays of NumPy: each check finds wrong numbers."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.config import Settings
from ringcomm.testing.cluster import RankFailed, run_ranks
from tests.support.device_contract import CHECKS, Lab, same

SETTINGS = Settings(spin_us=0.0, timeout_s=30.0, start_timeout_s=30.0)


class Host(Lab):
    """Arrays in host memory, where every kernel is done at once."""

    dtypes = ("float32", "int32")

    def array(self, values):
        return np.array(values)

    def numpy(self, array):
        return np.array(array)

    def add_slowly(self, array, number):
        array += array.dtype.type(number)

    def strided(self, values):
        return np.asfortranarray(values)


class Wrong(Host):
    """One element of all that is read is not what it should be."""

    def numpy(self, array):
        found = np.array(array)
        found.reshape(-1)[:1] += found.dtype.type(1)
        return found


def test_each_check_finds_a_wrong_number():
    for check in CHECKS:
        with pytest.raises(RankFailed) as caught:
            run_ranks(1, lambda context, check=check: check(context, Wrong()), settings=SETTINGS)
        assert isinstance(caught.value.__cause__, AssertionError), check.__name__
        assert "bytes differ" in str(caught.value.__cause__), check.__name__


@pytest.mark.parametrize(
    "found, words",
    [
        (np.zeros((1, 2)), r"x: shape \(1, 2\), not \(2,\)"),
        (np.zeros(2, np.float32), "x: float32, not float64"),
        (np.array([0.0, -0.0]), "x: 1 bytes differ, the first is number 15"),
    ],
    ids=["shape", "type", "bytes"],
)
def test_arrays_are_the_same_if_their_bytes_are(found, words):
    same(np.zeros(2), np.zeros(2), "x")
    same(np.array([np.nan]), np.array([np.nan]), "x")
    with pytest.raises(AssertionError, match=words):
        same(found, np.zeros(2), "x")
