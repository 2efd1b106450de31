from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from ringcomm.config import Slot
from ringcomm.errors import ConfigError
from ringcomm.wire.signing import Signer
from ringrun.agent.worker import Call, carries_bytecode, pack_call, unpack_call
from ringrun.plan.signed import about_call, about_result, signed, verified


def test_a_call_travels() -> None:
    path, unpickle = unpack_call(pack_call(Call(lambda x, y: x + y, (1,), {"y": 2}), ["/a", "/b"]))
    call = unpickle()
    assert path == ["/a", "/b"]
    assert call.fn(*call.args, **call.kwargs) == 3


def test_only_functions_by_value_depend_on_the_version_of_python() -> None:
    number = 3
    assert carries_bytecode(pack_call(Call(lambda: number, (), {}), []))
    assert not carries_bytecode(pack_call(Call(threading.active_count, (), {}), []))


SIGNER = Signer(b"k" * 32, "job")


def test_what_is_signed_is_verified() -> None:
    assert verified(signed(b"call", SIGNER, *about_call()), SIGNER, *about_call()) == b"call"
    about = about_result(Slot(1, 0))
    assert verified(signed(b"", SIGNER, *about), SIGNER, *about) == b""


@pytest.mark.parametrize(
    "signer, about",
    [
        (Signer(b"x" * 32, "job"), about_result(Slot(1, 0))),
        (Signer(b"k" * 32, "attempt before"), about_result(Slot(1, 0))),
        (SIGNER, about_result(Slot(0, 1))),
        (SIGNER, about_call()),
    ],
)
def test_what_another_has_signed_is_not(signer: Signer, about: object) -> None:
    data = signed(b"call", signer, *about)  # type: ignore[misc]
    assert verified(data, SIGNER, *about_result(Slot(1, 0))) is None
    assert verified(data[:20], signer, *about) is None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("args", "kwargs", "part"),
    [
        ((1, threading.Lock()), {}, "The function's argument args[1], a lock,"),
        ((), {"x": 1, "where": threading.Lock()}, "The function's argument where, a lock,"),
        ((), {}, "The function, or something that it uses,"),
    ],
)
def test_what_cannot_be_sent_is_named(args: Any, kwargs: Any, part: str) -> None:
    lock = threading.Lock()
    fn: Any = os.getpid if args or kwargs else lambda: lock
    with pytest.raises(ConfigError) as caught:
        pack_call(Call(fn, args, kwargs), [])
    assert str(caught.value).startswith(part) and "cannot be sent to other processes" in str(caught.value)
