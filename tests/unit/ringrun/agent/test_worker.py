from __future__ import annotations

import threading

import cloudpickle

from ringrun.agent.worker import Call, carries_bytecode, pack_call, pack_error, pack_value, unpack_call


def test_a_call_travels() -> None:
    path, unpickle = unpack_call(pack_call(Call(lambda x, y: x + y, (1,), {"y": 2}), ["/a", "/b"]))
    call = unpickle()
    assert path == ["/a", "/b"]
    assert call.fn(*call.args, **call.kwargs) == 3


def test_only_functions_by_value_depend_on_the_version_of_python() -> None:
    number = 3
    assert carries_bytecode(pack_call(Call(lambda: number, (), {}), []))
    assert not carries_bytecode(pack_call(Call(threading.active_count, (), {}), []))


def test_a_value_travels() -> None:
    assert cloudpickle.loads(pack_value([None])) == {"ok": True, "value": [None]}


def test_an_error_travels_as_text_and_as_itself() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        facts = cloudpickle.loads(pack_error(error, skip=0))
    assert (facts["ok"], facts["summary"]) == (False, "ValueError: broken")
    assert "in test_an_error_travels" in facts["traceback"]
    assert isinstance(cloudpickle.loads(facts["exception"]), ValueError)


def test_an_error_that_cannot_be_pickled_travels_as_text() -> None:
    facts = cloudpickle.loads(pack_error(ValueError(threading.Lock()), skip=0))
    assert facts["exception"] is None and "ValueError" in facts["summary"]
