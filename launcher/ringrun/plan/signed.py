"""Signatures of the pickles exchanged between a job's ranks and ``rc.run``: the function and its results.

Both pass through the agents of the hosts. Data is unpickled only after its signature with the job's key is
verified.
"""

from __future__ import annotations

from typing import Optional, Tuple

from ringcomm.config import Slot
from ringcomm.wire.auth import Signer


def signed(data: bytes, signer: Signer, *about: object) -> bytes:
    """Return the signature of data that the receiver will unpickle, bound to a purpose, and the data."""
    return signer.sign(data, "ringrun", *about) + data


def verified(data: bytes, signer: Signer, *about: object) -> Optional[bytes]:
    """Return the data that :func:`signed` was given; None if data or purpose do not match the signature."""
    signature, rest = data[: Signer.SIGNATURE_BYTES], data[Signer.SIGNATURE_BYTES :]
    return rest if signer.verifies(rest, signature, "ringrun", *about) else None


def about_call() -> Tuple[str]:
    """Return the purpose that the payload's signature is bound to."""
    return ("function",)


def about_result(place: Optional[Slot]) -> Tuple[object, ...]:
    """Return the purpose that the signature of a rank's result is bound to, with the rank's slot."""
    return ("result", *(place or ()))
