from __future__ import annotations

import os
import sys
import tempfile
import threading
from typing import Any, Callable, Dict, List, Optional

import pytest

from ringcomm.calls.objects import unpack
from ringcomm.config import Slot
from ringcomm.errors import ConfigError, Misuse
from ringcomm.wire.auth import Signer
from ringrun.agent import worker
from ringrun.agent.worker import Call, pack_call
from ringrun.plan.job import signed, verified

KEY = b"k" * 32
SIGNER = Signer(KEY, "job")


@pytest.mark.parametrize(
    "signer, about",
    [
        (Signer(b"x" * 32, "job"), ("result", *Slot(1, 0))),
        (Signer(b"k" * 32, "attempt before"), ("result", *Slot(1, 0))),
        (SIGNER, ("result", *Slot(0, 1))),
        (SIGNER, ("function",)),
    ],
)
def test_what_another_has_signed_is_not(signer: Signer, about: object) -> None:
    data = signed(b"call", signer, *about)  # type: ignore[misc]
    assert verified(data, SIGNER, "result", *Slot(1, 0)) is None
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


# ---- the program of a rank ----------------------------------------------------------------------------


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[Optional[bytes]], bytes]:
    """`rank(payload)`: what the program of rank 1 writes as its result, signed or not."""
    for name, value in (("KEY", KEY.hex()), ("JOB", "job"), ("SLOT", "0:1"), ("SIZE", "2")):
        monkeypatch.setenv(f"RINGCOMM_{name}", value)
    for name in ("KEY_FD", "KEY_FILE"):
        monkeypatch.delenv(f"RINGCOMM_{name}", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(payload: Optional[bytes]) -> bytes:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as result:
            given.write(payload or b"")
            given.seek(0)
            descriptors = [os.dup(file.fileno()) for file in (given, result)]
            for descriptor in descriptors:
                os.set_inheritable(descriptor, True)
            try:
                worker.main(*descriptors)
            finally:
                result.seek(0)
                results.append(result.read())
        return results[-1]

    results: List[bytes] = []
    run.results = results  # type: ignore[attr-defined]
    return run


def own(payload: bytes) -> bytes:
    return signed(payload, SIGNER, "function")


def result_of(data: bytes) -> Dict[str, Any]:
    found = verified(data, SIGNER, "result", *Slot(0, 1))
    assert found is not None
    return unpack(found)


def test_what_the_function_returns_is_signed_by_the_rank(rank: Callable[[Optional[bytes]], bytes]) -> None:
    payload = pack_call(Call(lambda a, b: a * b, (6,), {"b": 7}), ["/a/folder", sys.path[0]])
    before = list(sys.path)
    assert result_of(rank(own(payload))) == {"ok": True, "value": 42}
    assert sys.path == [*before, "/a/folder"], "a folder is not added twice"


def test_what_the_function_raises_is_sent_and_ends_the_process(rank: Any) -> None:
    def fail() -> None:
        raise KeyError("no such thing")

    with pytest.raises(KeyError) as caught:
        rank(own(pack_call(Call(fail, (), {}), [])))
    found = result_of(rank.results[0])
    assert not found["ok"] and found["summary"] == "KeyError: 'no such thing'"
    assert "in fail" in found["traceback"] and "in main" not in found["traceback"]
    assert caught.traceback[-1].name == "fail"


@pytest.mark.parametrize(
    "payload", [b"", b"x" * 100, signed(b"{}\n", SIGNER, "result", *Slot(0, 1))],
    ids=["empty", "unsigned", "result"],
)  # fmt: skip
def test_a_call_without_a_valid_signature_is_not_unpickled(rank: Any, payload: bytes) -> None:
    with pytest.raises(Misuse, match="not signed with the job's key"):
        rank(payload)
    assert rank.results == [b""]
