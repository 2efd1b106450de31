"""How kinds of arrays are found, and what they and their engines are taken for if they say nothing else."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ringcomm.arrays import kinds
from ringcomm.arrays.cupy_arrays import DLPACK
from ringcomm.arrays.cupy_arrays import KIND as CUPY
from ringcomm.arrays.kinds import StagingPool, block_bytes, kind_of, register_kind
from ringcomm.arrays.torch_tensors import KIND as TORCH
from ringcomm.errors import DeviceError
from tests.unit.arrays.copying import Kind


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Types of one test are not known in the next."""
    monkeypatch.setattr(kinds, "_BY_TYPE", dict(kinds._BY_TYPE))


def made(package, name, *bases, **attributes):
    """An object of a class of this name in a package."""
    return type(name, bases, {"__module__": f"{package}.core", **attributes})()


@pytest.mark.parametrize(
    "package, name, kind",
    [
        ("torch", "Tensor", TORCH),
        ("torch", "Parameter", TORCH),
        ("cupy", "ndarray", CUPY),
        ("jaxlib", "ArrayImpl", DLPACK),
        ("tensorflow", "EagerTensor", DLPACK),
    ],
    ids=lambda item: item if isinstance(item, str) else item.name,
)
def test_types_are_found_by_name_and_by_the_names_of_their_bases(package, name, kind):
    value = made(package, name)
    assert kind_of(value) is kind
    assert kind_of(made("program", "Own", type(value))) is kind
    assert kind_of(made("program", name)) is None, "the package counts too"


def test_other_types_are_found_by_what_they_export():
    assert kind_of(made("numba", "Array", __cuda_array_interface__={})) is DLPACK
    assert kind_of(made("other", "Array", __dlpack_device__=lambda self: (2, 0))) is DLPACK
    assert kind_of(object()) is None


def test_a_registered_kind_counts_for_subclasses_unless_the_host_may_use_them():
    kind = Kind()
    value = made("program", "Array")
    register_kind(type(value), kind)
    below = made("program", "Below", type(value))
    assert kind_of(below) is kind
    register_kind(type(below), None)
    assert kind_of(below) is None and kind_of(value) is kind


@pytest.fixture
def kind():
    return Kind()


@pytest.fixture
def pool():
    return StagingPool()


def test_size_classes_waste_a_quarter_at_most():
    for nbytes in (*range(1, 5000, 7), 12345, 999_999, 1 << 26, (1 << 26) + 1):
        size = block_bytes(nbytes)
        assert nbytes <= size <= max(4096, 1.25 * nbytes)
        assert block_bytes(size) == size


def test_a_block_is_used_again_when_its_copies_are_done(kind, pool):
    array = np.arange(1000.0)
    mirror = pool.mirror(kind, array)
    mirror.load(0, 800)
    mirror.store(0, 800)
    mirror.finish()
    pool.mirror(kind, array)
    assert kind.made.blocks == pool.allocations == 2, "its copies were on their way"
    kind.made.complete()
    gc.collect()
    pool.mirror(kind, array)
    assert kind.made.blocks == 2


def test_what_the_program_has_queued_comes_before_the_first_copy_of_each_direction(kind, pool):
    mirror = pool.mirror(kind, np.arange(1000.0))
    mirror.load(0, 800)
    mirror.store(0, 400)
    mirror.store(400, 800)
    ready = kind.made.ready
    assert [copy[3] for copy in kind.made.copies] == [ready, ready, None]


def test_a_failed_copy_is_an_error_at_the_end_or_at_the_next_call(kind, pool):
    mirror = pool.mirror(kind, np.zeros(10))
    mirror.store_all()
    kind.made.copies[-1][-1].error = DeviceError("broken")
    with pytest.raises(DeviceError):
        mirror.finish()
    mirror.release()
    with pytest.raises(DeviceError):
        pool.mirror(kind, np.zeros(10))
    pool.mirror(kind, np.zeros(10))
