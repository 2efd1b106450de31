"""What a function has returned or raised, as bytes and back."""

from __future__ import annotations

import threading

import cloudpickle
import pytest

from ringcomm.errors import Misuse
from ringcomm.results import pack_error, pack_value, remote_error, unpack


def test_a_value_travels() -> None:
    assert unpack(pack_value([None])) == {"ok": True, "value": [None]}


def test_an_error_travels_as_text_and_as_itself() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        facts = unpack(pack_error(error, skip=0))
    assert (facts["ok"], facts["summary"]) == (False, "ValueError: broken")
    assert "in test_an_error_travels" in facts["traceback"]
    assert isinstance(cloudpickle.loads(facts["exception"]), ValueError)


def test_an_error_that_cannot_be_pickled_travels_as_text() -> None:
    facts = unpack(pack_error(ValueError(threading.Lock()), skip=0))
    assert facts["exception"] is None and "ValueError" in facts["summary"]
    error = remote_error(facts, 2, "jetson1")
    assert (error.rank, error.host, error.__cause__) == (2, "jetson1", None)


def test_a_value_that_cannot_be_pickled_is_the_programs_mistake() -> None:
    with pytest.raises(Misuse, match="return value, a lock, cannot be sent back"):
        pack_value(threading.Lock())


def test_the_error_for_the_caller_has_the_ranks_own_as_its_cause() -> None:
    error = remote_error(unpack(pack_error(KeyError("sample"))), 1, "jetson2")
    assert isinstance(error.__cause__, KeyError)
    assert str(error).startswith("rank 1 on jetson2: KeyError: 'sample'")
    assert "KeyError" in error.traceback_text


def test_outermost_frames_are_left_out() -> None:
    def inner() -> None:
        raise ValueError("broken")

    try:
        inner()
    except ValueError as error:
        texts = [unpack(pack_error(error, skip))["traceback"] for skip in range(4)]
    assert [text.count("  File ") for text in texts] == [2, 1, 0, 0]
    assert "in inner" in texts[1] and all(text.endswith("ValueError: broken\n") for text in texts)
