"""How kinds of arrays are found, and what they and their engines are taken for if they say nothing else."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

from ringcomm.arrays import kinds
from ringcomm.arrays.cupy_arrays import DLPACK
from ringcomm.arrays.cupy_arrays import KIND as CUPY
from ringcomm.arrays.kinds import device_kind, kind_of, register_kind
from ringcomm.arrays.torch_tensors import KIND as TORCH
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


def test_arrays_of_numpy_and_plain_values_have_no_kind():
    pair = namedtuple("pair", "one two")
    for value in (np.zeros(1), np.zeros(1).view(np.recarray), [1], pair(1, 2), 2.5, True, "text", None):
        assert kind_of(value) is None and device_kind(value) is None


def test_a_registered_kind_counts_for_subclasses_unless_the_host_may_use_them():
    kind = Kind()
    value = made("program", "Array")
    register_kind(type(value), kind)
    below = made("program", "Below", type(value))
    assert kind_of(below) is kind
    register_kind(type(below), None)
    assert kind_of(below) is None and kind_of(value) is kind


def test_an_array_that_no_device_holds_may_be_used_as_it_is():
    kind = Kind()
    kind.on_device = lambda value: False
    value = made("program", "Array")
    register_kind(type(value), kind)
    assert kind_of(value) is kind and device_kind(value) is None
