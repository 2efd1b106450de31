"""Signatures of what travels between a job's ranks and ``rc.run``: the function, and what it has returned.

Both go through the agents of the hosts. Nothing is unpickled before it is clear that the job has signed it.
"""

from __future__ import annotations

from typing import Optional, Tuple

from ringcomm.config import Slot
from ringcomm.wire.signing import Signer


def signed(data: bytes, signer: Signer, *about: object) -> bytes:
    """Bytes that are going to be unpickled, behind their signature."""
    return signer.sign(data, "ringrun", *about) + data


def verified(data: bytes, signer: Signer, *about: object) -> Optional[bytes]:
    """What :func:`signed` was given; None if the job has not signed these bytes as just this."""
    signature, rest = data[: Signer.SIGNATURE_BYTES], data[Signer.SIGNATURE_BYTES :]
    return rest if signer.verifies(rest, signature, "ringrun", *about) else None


def about_call() -> Tuple[str]:
    """What the signature of a payload says."""
    return ("function",)


def about_result(place: Optional[Slot]) -> Tuple[object, ...]:
    """What the signature of a rank's result says."""
    return ("result", *(place or ()))
