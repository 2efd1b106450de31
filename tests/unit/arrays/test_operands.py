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
    submitted,
)
from ringcomm.errors import Misuse, UnsupportedDtypeError
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
