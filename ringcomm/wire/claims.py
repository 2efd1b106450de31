"""What a connection is for, and between which ranks of which job: the claim that its handshake proves."""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import NamedTuple

NO_RANK = -1
"""In a claim: not a rank (the rendezvous, or a process that has no rank yet)."""


class Purpose(IntEnum):
    """What a connection is for."""

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
    """The initiator's description of itself and of the connection; authenticated with the key.

    Attributes:
        purpose: one of :class:`Purpose`.
        job: digest of the job's name, from :func:`job_digest`.
        generation: membership epoch.
        source: the initiator's rank, or ``NO_RANK``.
        target: the rank that the initiator expects at the other end, or ``NO_RANK``.
    """

    purpose: int
    job: bytes
    generation: int = 0
    source: int = NO_RANK
    target: int = NO_RANK


def job_digest(job: str) -> bytes:
    """The 16 bytes by which a job is named on the wire."""
    return hashlib.sha256(b"ringcomm job\0" + job.encode("utf-8")).digest()[:16]
