"""Buckets: what travels together, decided by signatures alone."""

from __future__ import annotations

from ringcomm.engine.fusion import Ready, fuse
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_OP, NO_ROOT
from ringcomm.wire.signature import Signature


def member(number: int, items: int = 1, **changes) -> Ready:
    plain = Signature(
        f"t{number}", 0, int(Collective.ALLREDUCE), int(ReduceOp.SUM), NO_ROOT, ("float32",), ((items,),)
    )
    signature = plain._replace(**changes)
    return Ready(signature, number, signature.nbytes, {})


def planned(members, threshold_bytes=100):
    return [[item.number for item in bucket] for bucket in fuse(members, threshold_bytes)]


def test_fills_up_to_the_threshold():
    assert planned([member(n, 10) for n in range(5)]) == [[0, 1], [2, 3], [4]]


def test_never_across_sets_scales_or_kinds():
    kinds = [
        member(0),
        member(1, process_set=1),
        member(2, prescale=0.5),
        member(3, postscale=0.5),
        member(4, kind=int(Collective.REDUCESCATTER)),
        member(5, kind=int(Collective.ALLGATHER), op=NO_OP),
    ]
    assert planned(kinds) == [[n] for n in range(6)]


def test_some_are_always_alone():
    barrier = {"kind": int(Collective.BARRIER), "op": NO_OP, "shapes": (), "dtypes": ()}
    adasum = {"op": int(ReduceOp.ADASUM)}
    broadcast = {"kind": int(Collective.BROADCAST), "op": NO_OP, "root": 0}
    for changes in (barrier, adasum, broadcast):
        assert planned([member(0, **changes), member(1, **changes)]) == [[0], [1]]
