"""Small operations without a collective of their own: announcements and responses have their numbers.

A rank whose caller waits for a few bytes sends them with the announcement of the operation. If every member
has done so, rank 0 combines them, and its responses have the result: only the messages of the negotiation are
sent. If one of them has not (its caller did not wait, or it has joined), the operation runs as any other, and
the piggybacked bytes are dropped. So no rank depends on what the others do.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from typing import Mapping, Sequence

import numpy as np

from ..collective.reduce import kernel, weigh, weighable
from ..collective.weighted import Total
from ..dtypes import Array, dtype_named
from ..errors import ProtocolError
from ..ops import Collective, ReduceOp
from ..wire.signature import Signature
from .request import Request

PIGGYBACK_BYTES = 512
"""Maximum bytes of an operation. Rank 0 handles those of all ranks, so this is for losses and accuracies."""

_KINDS = (int(Collective.ALLREDUCE), int(Collective.BROADCAST), int(Collective.BARRIER))


def may_piggyback(request: Request) -> bool:
    """Return whether the numbers of an operation may travel with its announcement."""
    signature, arrays = request.signature, request.arrays
    if signature.kind not in _KINDS or signature.op == ReduceOp.ADASUM or signature.codec:
        return False
    # With a mirror the device has still to copy the numbers; a settled result does not say which parts all
    # ranks lack.
    if request.mirrors or request.absent:
        return False
    return len(arrays) <= 1 and sum(array.nbytes for array in arrays) <= PIGGYBACK_BYTES


def pack(request: Request, rank: int) -> str:
    """This rank's contribution as text. Of a broadcast only the root has one."""
    signature = request.signature
    if not request.arrays or (signature.kind == Collective.BROADCAST and signature.root != rank):
        return ""
    return b2a_base64(request.arrays[0].view(np.uint8).data, newline=False).decode("ascii")


def settle(
    signature: Signature, members: Sequence[int], packed: Mapping[int, str], weights: Mapping[int, float]
) -> str:
    """Return what the operation comes to, from what every member has sent along.

    Contributions are combined in the order of ranks, once for all, so every rank gets the same bits.
    """
    if not signature.dtypes:  # a barrier, or an operation of no arrays
        return ""
    if signature.kind == Collective.BROADCAST:
        return packed[signature.root]
    operands = [_numbers(signature, packed[rank], rank) for rank in members]
    if signature.weighted:
        total = Total.of(weights.values())
        operands = [weighable(operand) for operand in operands]
        for rank, operand in zip(members, operands):
            weigh(operand, total.share(weights[rank], len(members)))
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
        out = out.astype(dtype_named(signature.dtypes[0]), copy=False)
    return b2a_base64(out.view(np.uint8).data, newline=False).decode("ascii")


def unpack(request: Request, text: str) -> None:
    """Write the result over this rank's numbers."""
    if request.arrays:
        request.arrays[0][:] = _numbers(request.signature, text, 0)


def _numbers(signature: Signature, text: str, rank: int) -> Array:
    try:
        data = bytearray(a2b_base64(text))
    except ValueError:
        data = bytearray()
    if len(data) != signature.nbytes:
        raise ProtocolError(
            f"rank {rank} sent {len(data)} bytes along with {signature.describe(named=False)}, "
            f"which has {signature.nbytes}"
        )
    numbers: Array = np.frombuffer(data, dtype_named(signature.dtypes[0]))
    return numbers
