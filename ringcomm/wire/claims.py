"""The claim that a connection's handshake proves: its purpose, and between which ranks of which job it is."""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import NamedTuple

NO_RANK = -1
"""In a claim: not a rank (the rendezvous, or a process that has no rank yet)."""


class Purpose(IntEnum):
    """The purpose of a connection."""

    CONTROL = 1
    """From a rank to the rendezvous."""
    PROBE = 2
    """To find out which address leads to which rank, and how fast."""
    DIRECT = 3
    """A link between two ranks, for the collectives that all ranks call in the same order."""
    BACKGROUND = 4
    """A link between two ranks, for the collectives that the engine matches by name."""
    ENGINE_CONTROL = 5
    """A control link between engines: requests to rank 0, its responses, and heartbeats."""


class Claim(NamedTuple):
    """The initiator's description of itself and of the connection; authenticated with the key."""

    purpose: int  # one of :class:`Purpose`
    job: bytes  # from :func:`job_digest`
    generation: int = 0  # membership epoch
    source: int = NO_RANK
    target: int = NO_RANK  # the rank that the initiator expects at the other end


def job_digest(job: str) -> bytes:
    """Return the 16 bytes that name a job on the wire."""
    return hashlib.sha256(b"ringcomm job\0" + job.encode("utf-8")).digest()[:16]
