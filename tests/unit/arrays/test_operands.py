"""Arrays as arguments: of every layout, and on devices what is copied when, and what the caller gets."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.arrays import kinds
from ringcomm.arrays.kinds import StagingPool
from ringcomm.arrays.operands import (
    DeviceOperand,
    InPlace,
    as_array,
    flat_copy,
    flat_view,
    operand_of,
    submitted,
)
from ringcomm.errors import Misuse, UnsupportedDtypeError
from tests.support.reference import all_dtypes
from tests.unit.arrays.copying import Kind


class Array(np.ndarray):
    """An array on a device, for the functions that find kinds by type."""


def on_device(*values):
    return np.array(values).view(Array)


class Results(Kind):
    """A kind whose library wraps results."""

    def result(self, array, like):
        return ("result", array, like)


class Frozen(Kind):
    def check_writable(self, value, what):
        raise Misuse(f"{what}: immutable")


class Mapped(Kind):
    """A kind of arrays that the host can use where they are."""

    def mapped(self, flat):
        return flat


@pytest.fixture
def pool():
    return StagingPool()


@pytest.fixture
def use(monkeypatch):
    """Makes a kind known for :class:`Array`."""

    def register(kind):
        monkeypatch.setitem(kinds._BY_TYPE, Array, kind)
        return kind.made

    return register


def doubled(operand):
    """What a collective does: load, compute, store."""
    operand.mirror.load(0, operand.mirror.nbytes)
    operand.flat[:] *= 2
    operand.mirror.store_all()
    return operand


class TestDeviceOperand:
    def test_in_place_the_array_itself_is_overwritten(self, pool):
        array = np.arange(6.0).reshape(2, 3)
        operand = doubled(DeviceOperand(pool, Kind(), array, "allreduce_"))
        assert (operand.shape, operand.flat.size) == ((2, 3), 6) and operand.target is operand.on_device
        assert operand.finish() is array
        assert array.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]

    def test_a_new_array_is_one_of_the_callers_library(self, pool):
        kind, array = Results(), np.arange(6.0).reshape(2, 3)
        name, result, like = doubled(DeviceOperand(pool, kind, array)).finish()
        assert name == "result" and like is array
        assert result.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]] and array[1, 2] == 5.0
        operand = doubled(DeviceOperand(pool, kind, array))
        assert operand.finish((3, 2))[1].shape == (3, 2)

    def test_what_cannot_be_overwritten_or_sent_is_refused_before_anything_is_copied(self, pool):
        with pytest.raises(Misuse, match="broadcast_: immutable"):
            DeviceOperand(pool, Frozen(), np.zeros(3), "broadcast_")
        kind = Frozen()
        doubled(DeviceOperand(pool, kind, np.zeros(3)))  # a new array
        with pytest.raises(UnsupportedDtypeError):
            DeviceOperand(pool, kind, np.zeros(3, "M8[s]"))
        assert len(kind.made.copies) == 2

    def test_in_mapped_memory_the_host_waits_for_the_program_and_copies_nothing(self, pool):
        kind, array, waited = Mapped(), np.arange(3.0), []
        operand = DeviceOperand(pool, kind, array, "allreduce_")
        mirror = operand.mirror
        assert mirror.shared and np.shares_memory(operand.flat, array)
        mirror.preload()
        mirror.fetch(waited.append)
        assert waited == [kind.made.ready]
        operand.flat[:] *= 2
        mirror.store_all()
        mirror.keep_source()
        assert operand.finish() is array and array.tolist() == [0.0, 2.0, 4.0]
        assert (kind.made.copies, kind.made.followed, kind.made.blocks) == ([], [], 0)
        assert not DeviceOperand(pool, kind, array).mirror.shared, "the array must stay as it is"


class TestSubmitted:
    def test_the_caller_may_change_an_array_that_is_not_overwritten(self, pool, use):
        engine = use(Kind())
        submitted(pool, on_device(1.0, 2.0))
        ((*_, load),) = engine.copies
        assert engine.followed == [load], "the caller's stream waits until it is loaded"


@pytest.mark.parametrize("make", [np.array, lambda values: on_device(*values)])
class TestOperandOf:
    """Arrays of the host and of devices do the same."""

    @pytest.fixture(autouse=True)
    def kind(self, use):
        use(Kind())

    def test_rows_are_read_where_they_are(self, pool, make):
        array = make([[1.0, 2.0], [3.0, 4.0]])
        source = operand_of(pool, array, rows=True)
        assert source.dtype == np.float64 and (source.mirror is None) == (type(array) is np.ndarray)
        made = source.output(6, 1, (2, 4))
        if made.mirror is not None:
            made.mirror.load(0, made.mirror.nbytes)
        assert made.flat[1:3].tolist() == [3.0, 4.0]
        made.flat[3:] = 7.0
        if made.mirror is not None:
            made.mirror.store_all()
        found = made.finish((3, 2))
        assert found[2].tolist() == [7.0, 7.0] and not np.shares_memory(found, array)

    @pytest.mark.parametrize("name", ["", "reducescatter_"])
    def test_some_rows_are_the_result(self, pool, make, name):
        array = make([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        operand = operand_of(pool, array, name)
        operand.narrow(1, 3)
        if operand.mirror is not None:
            operand.mirror.load(0, operand.mirror.nbytes)
        operand.flat[2:] *= 2
        if operand.mirror is not None:
            operand.mirror.store(16, 48)
        found = operand.finish_rows(1, 3)
        assert found.tolist() == [[6.0, 8.0], [10.0, 12.0]]
        assert np.shares_memory(found, array) == bool(name)


# ---- arrays of every layout ----------------------------------------------------------------------


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

    @pytest.mark.parametrize("value", [[1.0], 2.0, None, "x"])
    def test_only_arrays_can_be_overwritten(self, value):
        with pytest.raises(Misuse, match="needs a numpy array, not .*Without the trailing underscore"):
            InPlace(value, "allreduce_")


@pytest.mark.parametrize("take", [flat_copy, flat_view, lambda array: InPlace(array, "allreduce_")])
def test_a_mask_is_not_lost_silently(take):
    with pytest.raises(Misuse, match="lose its mask.*filled"):
        take(np.ma.masked_array([1.0, 2.0], [False, True]))
