"""Small operations without a collective of their own: their numbers ride with announcements and orders.

A rank that waits for a few bytes anyway sends them along when it announces the operation. If every member
has done so, rank 0 combines them, and its orders carry the result: the negotiation is all that travels. If
one of them has not (it did not wait, or it has joined), the operation runs as any other, and what was sent
along is forgotten. So no rank needs to know what the others do.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from typing import Mapping, Optional, Sequence

import numpy as np

from ..collective.reduce import kernel, weigh
from ..dtypes import Array, dtype_named
from ..errors import ProtocolError
from ..ops import Collective, ReduceOp
from .announcements import sum_of_weights
from .request import Request, Signature

CARRIED_BYTES = 512
"""The most that rides along. Rank 0 handles the bytes of all ranks, so this is for losses and accuracies."""

_KINDS = (int(Collective.ALLREDUCE), int(Collective.BROADCAST), int(Collective.BARRIER))


def may_ride(request: Request) -> bool:
    """Whether the numbers of an operation may travel with its announcement."""
    kind, arrays = request.signature.kind, request.arrays
    if kind not in _KINDS or request.signature.op == ReduceOp.ADASUM:
        return False
    return len(arrays) <= 1 and sum(array.nbytes for array in arrays) <= CARRIED_BYTES


def pack(request: Request, rank: int) -> str:
    """What a rank sends along. Of a broadcast only the root has anything to say."""
    signature = request.signature
    if not request.arrays or (signature.kind == Collective.BROADCAST and signature.root != rank):
        return ""
    return b2a_base64(request.arrays[0].view(np.uint8).data, newline=False).decode("ascii")


def settle(
    signature: Signature,
    members: Sequence[int],
    packed: Mapping[int, str],
    weights: Optional[Mapping[int, float]] = None,
) -> str:
    """What the operation comes to, from what every member has sent along.

    Contributions are combined in the order of ranks, once for all, so every rank gets the same bits.

    Raises:
        ProtocolError: what was sent along does not fit the signature.
    """
    if signature.kind == Collective.BARRIER:
        return ""
    if signature.kind == Collective.BROADCAST:
        return packed[signature.root]
    operands = [_numbers(signature, packed[rank], rank) for rank in members]
    if signature.weighted and weights is not None:
        total = sum_of_weights(weights)
        for rank, operand in zip(members, operands):
            weigh(operand, weights[rank] * len(members) / total)
    fold = kernel(
        ReduceOp(signature.op), operands[0].dtype, len(members), signature.prescale, signature.postscale
    )
    for operand in operands:
        fold.prepare(operand)
    out = operands[0]
    with np.errstate(all="ignore"):
        if len(operands) == 1:
            fold.finish_alone(out)
        elif out.size:
            fold.fold(out, operands, final=True)
    return b2a_base64(out.view(np.uint8).data, newline=False).decode("ascii")


def unpack(request: Request, text: str) -> None:
    """Write the result over this rank's numbers."""
    if request.arrays:
        request.arrays[0][:] = _numbers(request.signature, text, 0)


def _numbers(signature: Signature, text: str, rank: int) -> Array:
    data = bytearray(a2b_base64(text))
    if len(data) != signature.nbytes:
        raise ProtocolError(
            f"rank {rank} sent {len(data)} bytes along with {signature.describe()}, "
            f"which has {signature.nbytes}"
        )
    numbers: Array = np.frombuffer(data, dtype_named(signature.dtypes[0]))
    return numbers
