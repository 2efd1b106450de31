"""What a function has returned or raised, as bytes and back, also between NumPy 1 and 2."""

from __future__ import annotations

import pickle
import sys
import threading
import types

import numpy as np
import pytest

from ringcomm.calls.objects import pack_error, pack_value, remote_error, unpack, unpickled
from ringcomm.errors import Misuse

ARRAY = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def test_an_error_travels_as_text_and_as_itself() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        facts = unpack(pack_error(error, skip=0))
    assert (facts["ok"], facts["summary"]) == (False, "ValueError: broken")
    assert "in test_an_error_travels" in facts["traceback"]
    error = remote_error(facts, 1, "jetson2")
    assert isinstance(error.__cause__, ValueError) and error.traceback_text == facts["traceback"]
    assert str(error).startswith("rank 1 on jetson2: ValueError: broken")


def test_an_error_that_cannot_be_pickled_travels_as_text() -> None:
    facts = unpack(pack_error(ValueError(threading.Lock()), skip=0))
    assert facts["exception"] is None and "ValueError" in facts["summary"]
    error = remote_error(facts, 2, "jetson1")
    assert (error.rank, error.host, error.__cause__) == (2, "jetson1", None)


def test_a_value_that_cannot_be_pickled_is_the_programs_mistake() -> None:
    with pytest.raises(Misuse, match="return value, a lock, cannot be sent back"):
        pack_value(threading.Lock())


def test_the_error_for_the_caller_lacks_a_cause_that_only_the_ranks_host_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("only_on_the_host")
    module.__dict__["Full"] = type("Full", (RuntimeError,), {"__module__": module.__name__})
    with monkeypatch.context() as there:
        there.setitem(sys.modules, module.__name__, module)
        data = pack_error(module.Full("GPU 0 is full"))
    error = remote_error(unpack(data), 1, "jetson1")
    assert "rank 1 on jetson1: only_on_the_host.Full: GPU 0 is full" in str(error)
    assert error.__cause__ is None


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
