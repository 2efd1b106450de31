"""What operations are called in traces and reports."""

from __future__ import annotations

import pytest

from ringcomm.engine.observer import label_of
from ringcomm.engine.request import Signature
from ringcomm.ops import Collective, ReduceOp


@pytest.mark.parametrize(
    ("kind", "name", "label"),
    [
        (Collective.ALLREDUCE, "loss", "allreduce.loss"),
        (Collective.ALLREDUCE, "", "allreduce.noname.7"),
        (Collective.BROADCAST, "broadcast.parameters.bias", "broadcast.parameters.bias"),
        (Collective.BROADCAST, "broadcaster", "broadcast.broadcaster"),
        (Collective.ALLGATHER, "allreduce.x", "allgather.allreduce.x"),
    ],
)
def test_the_kind_is_said_once(kind: Collective, name: str, label: str) -> None:
    signature = Signature(name, 0, int(kind), int(ReduceOp.SUM), 0, ("float32",), ((3,),))
    assert label_of(signature, 7) == label
