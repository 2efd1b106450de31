"""What the flight recorder keeps of operations by name."""

from __future__ import annotations

import weakref

import numpy as np

from ringcomm.engine.operation_history import OperationHistory, began, finish
from ringcomm.engine.request import Handle, Request
from ringcomm.errors import MismatchError
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_ROOT
from ringcomm.wire.signature import Key, Signature


def request(name: str = "a") -> Request:
    kind, op = int(Collective.ALLREDUCE), int(ReduceOp.SUM)
    made = Request(
        Signature(name, 0, kind, op, NO_ROOT, ("float32",), ((4,),)),
        [np.zeros(4, np.float32)],
        Handle(name),
        site="train.py:1",
    )
    if not name:
        made.key = Key(0, "", 7)
    return made


def history(capacity: int = 3) -> OperationHistory:
    return OperationHistory(capacity, lambda process_set: 100 + process_set)


def test_from_submission_to_end():
    kept = history()
    done, running, waiting, failed = (request(name) for name in "abcd")
    for item in (done, running, waiting, failed):
        kept.submitted(item)
    began(done)
    finish(done, 42)
    began(running)
    finish(failed, error=MismatchError("no"))
    assert done.handle.wait() == 42
    rows = kept.rows()
    assert [(row["op"], row["name"], row["state"]) for row in rows] == [
        (2, "b", "running"), (3, "c", "submitted"), (4, "d", "failed"),
    ]  # fmt: skip
    assert rows[0]["moved"] == 100 and "moved" not in rows[1]
    assert rows[2]["error"] == "MismatchError: no"
    assert rows[1]["site"] == "train.py:1" and rows[1]["ended"] is None


def test_arrays_are_not_kept():
    kept, item = history(), request()
    kept.submitted(item)
    array = weakref.ref(item.arrays[0])
    finish(item)
    assert array() is None, "a reference to the request, or the history, would keep it too"
    assert kept.rows()[0]["state"] == "done"
