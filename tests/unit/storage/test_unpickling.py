"""A pickle by NumPy 2 is read by NumPy 1, and the other way round. Warnings are errors here."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from ringcomm.storage.unpickling import unpickled

ARRAY = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def pickle_of(package: str) -> bytes:
    """A pickle of ARRAY by the NumPy that has this package; protocol 2 has names as lines of text."""
    data = pickle.dumps(ARRAY, 2)
    return data.replace(b"cnumpy._core.", b"cnumpy.core.").replace(b"cnumpy.core.", f"c{package}.".encode())


@pytest.mark.parametrize("package", ["numpy._core", "numpy.core"])
def test_arrays_of_both_versions(package: str) -> None:
    data = pickle_of(package)
    assert f"c{package}.multiarray".encode() in data
    for value in (unpickled(data), unpickled(memoryview(data))):
        assert value.dtype == ARRAY.dtype and np.array_equal(value, ARRAY)


@pytest.mark.parametrize("package", ["numpy._core", "numpy.core"])
@pytest.mark.parametrize("name", ["numeric\n_frombuffer", "multiarray\nscalar", "multiarray\n_reconstruct"])
def test_functions_that_pickles_of_arrays_and_scalars_contain(package: str, name: str) -> None:
    assert unpickled(f"c{package}.{name}\n.".encode()).__name__ == name.split("\n")[1]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_large_and_small_objects(protocol: int) -> None:
    rows = [(number, str(number)) for number in range(999)]
    value = {"text": "numpy._core", "type": dict, "bytes": bytes(300_000), "rows": rows}
    data = pickle.dumps({**value, "array": np.arange(200_000)}, protocol)
    found = unpickled(memoryview(data))
    assert np.array_equal(found.pop("array"), np.arange(200_000))
    assert found == value


def test_what_is_no_pickle_raises() -> None:
    with pytest.raises(ModuleNotFoundError, match="numpy_core"):
        unpickled(b"cnumpy_core.numeric\n_frombuffer\n.")
    with pytest.raises((EOFError, pickle.UnpicklingError)):
        unpickled(pickle.dumps(ARRAY)[:-20])
