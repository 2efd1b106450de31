"""Which operations travel together: buckets of small tensors, planned without looking at any data."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from ..ops import Collective, ReduceOp
from ..wire.signature import Signature

FUSIBLE = (Collective.ALLREDUCE, Collective.REDUCESCATTER, Collective.ALLGATHER)


class Ready(NamedTuple):
    """An operation that is ready on every rank; ``more`` is what ranks are told of it besides."""

    signature: Signature
    number: int
    nbytes: int
    more: Dict[str, Any]


Bucket = List[Ready]


def fuse(ready: Sequence[Ready], threshold_bytes: int) -> List[Bucket]:
    """Divide operations into buckets, in the order in which they became ready.

    An operation joins the last bucket of its kind if there is room, also past others that do not fit
    in between: the order of execution is free as long as it is the same on every rank. With a threshold of
    0 bytes no operations share a bucket.
    """
    buckets: List[Bucket] = []
    open_buckets: Dict[Tuple[object, ...], Tuple[Bucket, int]] = {}
    for member in ready:
        signature, nbytes = member.signature, member.nbytes
        if signature.kind not in FUSIBLE or signature.op == ReduceOp.ADASUM or not threshold_bytes:
            buckets.append([member])
            continue
        alike = (
            signature.kind, signature.process_set, signature.op,
            signature.prescale, signature.postscale, signature.weighted, frozenset(signature.dtypes),
            signature.codec,
        )  # fmt: skip
        bucket, filled = open_buckets.get(alike, ([], 0))
        if not bucket or filled + nbytes > threshold_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(member)
        open_buckets[alike] = (bucket, filled + nbytes)
    return buckets
