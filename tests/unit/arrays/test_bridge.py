"""Arrays of every layout become flat, native and contiguous, and come back."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.arrays.bridge import as_array, flat_copy, flat_view
from ringcomm.arrays.operands import InPlace
from ringcomm.errors import Misuse, UnsupportedDtypeError
from tests.support.reference import all_dtypes


def read_only(array):
    array.flags.writeable = False
    return array


LAYOUTS = {
    "C": lambda a: a,
    "Fortran": np.asfortranarray,
    "strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "backwards": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "transposed": lambda a: a.T.copy().T,
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "read-only": lambda a: read_only(a.copy()),
}


@pytest.fixture(params=list(LAYOUTS))
def laid_out(request):
    """A 3 x 4 array in one layout after the other."""
    return LAYOUTS[request.param](np.arange(12, dtype=np.float64).reshape(3, 4))


@pytest.mark.parametrize("flatten", [flat_copy, flat_view])
def test_elements_in_c_order(laid_out, flatten):
    flat, shape = flatten(laid_out)
    assert shape == (3, 4)
    assert flat.ndim == 1
    assert flat.flags.c_contiguous
    assert flat.dtype.isnative
    assert flat.tolist() == np.asarray(laid_out).ravel(order="C").tolist()


def test_a_copy_is_always_new_and_writable(laid_out):
    flat, _ = flat_copy(laid_out)
    assert flat.flags.writeable
    assert not np.shares_memory(flat, laid_out)


def test_a_view_shares_memory_where_it_can():
    array = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(flat_view(array)[0], array)
    assert not np.shares_memory(flat_view(array.T)[0], array)


@pytest.mark.parametrize("value", [3.5, [1, 2], [[1.0], [2.0]], (), np.float32(2), np.zeros((0, 4)), True])
def test_whatever_numpy_takes(value):
    flat, shape = flat_copy(value)
    assert shape == np.shape(value)
    assert flat.tolist() == np.ravel(value).tolist()


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_every_element_type(dtype):
    assert as_array(np.zeros(3, dtype)).dtype == dtype
    target = InPlace(np.zeros((2, 2), dtype), "allreduce_")
    target.flat[:] = 1
    assert (target.finish() == np.ones((2, 2), dtype)).all()


@pytest.mark.parametrize("value", ["text", [object()], np.zeros(2, "M8[s]"), np.zeros(2, "f4,i4")])
def test_elements_that_cannot_travel(value):
    with pytest.raises(UnsupportedDtypeError, match="broadcast_object"):
        as_array(value)


class TestInPlace:
    def test_the_caller_s_own_array_is_overwritten(self, laid_out):
        if not laid_out.flags.writeable:
            with pytest.raises(Misuse, match="read-only"):
                InPlace(laid_out, "allreduce_")
            return
        expected = np.asarray(laid_out) * 2
        target = InPlace(laid_out, "allreduce_")
        target.flat *= 2
        assert target.finish() is laid_out
        np.testing.assert_array_equal(laid_out, expected)

    @pytest.mark.parametrize("array", [np.zeros((2, 3)), np.array(1.0), np.zeros((0, 2)), np.zeros(5)[1:4]])
    def test_contiguous_memory_is_not_copied(self, array):
        target = InPlace(array, "allreduce_")
        assert target.flat.base is array or np.shares_memory(target.flat, array) or array.size == 0
        target.flat[:] = 7
        assert (array == 7).all()

    def test_subclasses_are_taken_for_their_data(self):
        array = np.arange(4.0).view(np.recarray)
        target = InPlace(array, "allreduce_")
        assert type(target.flat) is np.ndarray
        target.flat[:] = 5
        assert (np.asarray(array) == 5).all()

    @pytest.mark.parametrize("value", [[1.0], 2.0, None, "x"])
    def test_only_arrays_can_be_overwritten(self, value):
        with pytest.raises(Misuse, match="needs a numpy array, not .*Without the trailing underscore"):
            InPlace(value, "allreduce_")

    def test_elements_that_cannot_travel(self):
        with pytest.raises(UnsupportedDtypeError):
            InPlace(np.array(["a"]), "broadcast_")


@pytest.mark.parametrize("take", [flat_copy, flat_view, lambda array: InPlace(array, "allreduce_")])
def test_a_mask_is_not_lost_silently(take):
    with pytest.raises(Misuse, match="lose its mask.*filled"):
        take(np.ma.masked_array([1.0, 2.0], [False, True]))
