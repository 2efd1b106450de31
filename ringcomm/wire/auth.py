"""The handshake that every connection starts with, as two state machines without I/O.

Both sides prove that they hold the job's key before either parses anything of variable length::

    initiator                                                    responder
        prelude: magic, version, claim, nonce_i            ->
                                 <-  challenge: magic, version, status, nonce_r, proof_r
        proof_i                                            ->

    proof_r = HMAC-SHA256(key, "responder" | prelude | nonce_r | binding)
    proof_i = HMAC-SHA256(key, "initiator" | prelude | nonce_r | binding)

The claim says what the connection is for, which job and generation it belongs to, and from which
rank to which. It is covered by both proofs, so it cannot be altered; the two labels keep a proof
from being reflected; the two nonces keep it from being replayed; the binding, the fingerprint of the
certificate on an encrypted connection and nothing on others, keeps it from being carried over from
the one to the other. All three messages have a fixed size, 180 bytes together, so a stranger can
neither be parsed wrongly nor make anyone allocate.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from enum import IntEnum
from typing import Callable, NamedTuple, Optional

from ..errors import AuthenticationError, ProtocolError

MAGIC = b"ringcomm"
PROTOCOL_VERSION = 1
NOBODY = -1
"""In a claim: not a rank (the rendezvous, or a process that has no rank yet)."""

_PRELUDE = struct.Struct("!8sHHIii16s32s")
_CHALLENGE = struct.Struct("!8sHH32s32s")
_PROOF_BYTES = 32
_ZEROS = bytes(32)

Random = Callable[[int], bytes]


class Purpose(IntEnum):
    """What a connection is for."""

    CONTROL = 1
    """From a rank to the rendezvous."""
    PROBE = 2
    """To find out which address leads to which rank, and how fast."""
    CALLS = 3
    """A link between two ranks, for the collectives that all ranks call in the same order."""
    ENGINE = 4
    """A link between two ranks, for the collectives that the engine matches by name."""
    ORDERS = 5
    """Between rank 0 and another: who has submitted what, and what the engines shall run."""
    COMPUTE = 6
    """From a process to the registry of dispatchers and workers that prepare data."""


class _Status(IntEnum):
    ACCEPTED = 0
    OTHER_VERSION = 1
    OTHER_JOB = 2
    OTHER_ENCRYPTION = 3


class Claim(NamedTuple):
    """What the initiator says about itself; proven with the key.

    Attributes:
        purpose: see :class:`Purpose`.
        job: digest of the job's name, from :func:`job_digest`.
        generation: membership epoch.
        source: the initiator's rank, or ``NOBODY``.
        target: the rank that the initiator means to reach, or ``NOBODY``.
    """

    purpose: int
    job: bytes
    generation: int = 0
    source: int = NOBODY
    target: int = NOBODY


def job_digest(job: str) -> bytes:
    """The 16 bytes by which a job is named on the wire."""
    return hashlib.sha256(b"ringcomm job\0" + job.encode("utf-8")).digest()[:16]


_TLS_HELLO = b"\x16"
"""What an encrypted connection starts with."""
FIRST_BYTES = MAGIC[:1] + _TLS_HELLO
"""What the first byte of a connection may be, if there is to be any sense in it."""


def _proof(key: bytes, label: bytes, prelude: bytes, nonce: bytes, binding: bytes = b"") -> bytes:
    return hmac.new(key, label + b"\0" + prelude + nonce + binding, hashlib.sha256).digest()


class Initiator:
    """The side that connected.

    Send :attr:`greeting`, then read exactly :attr:`needs` bytes, give them to :meth:`receive` and
    send what it returns; then :attr:`done` is true.
    """

    def __init__(self, key: bytes, claim: Claim, random: Random = os.urandom, binding: bytes = b"") -> None:
        self._key = key
        self._binding = binding
        self.claim = claim
        self.greeting = _PRELUDE.pack(
            MAGIC, PROTOCOL_VERSION, claim.purpose, claim.generation, claim.source, claim.target, claim.job,
            random(32),
        )  # fmt: skip
        self._received = b""
        self.done = False

    @property
    def needs(self) -> int:
        """How many bytes may be read now; reading more would touch what follows the handshake."""
        return 0 if self.done else _CHALLENGE.size - len(self._received)

    def receive(self, data: bytes) -> bytes:
        """Take at most :attr:`needs` bytes; return what to send (maybe nothing yet).

        Raises:
            AuthenticationError: the other side does not hold this job's key.
            ProtocolError: it is not ringcomm, or another version of it.
        """
        self._received += data
        if len(self._received) < _CHALLENGE.size:
            if not MAGIC.startswith(self._received[: len(MAGIC)]):
                raise ProtocolError("what answered is not ringcomm")
            return b""
        magic, version, status, nonce, proof = _CHALLENGE.unpack(self._received)
        if magic != MAGIC:
            raise ProtocolError("what answered is not ringcomm")
        if version != PROTOCOL_VERSION or status == _Status.OTHER_VERSION:
            raise ProtocolError(
                f"it speaks version {version} of ringcomm's protocol and this process version "
                f"{PROTOCOL_VERSION}; install the same ringcomm on both hosts"
            )
        if status == _Status.OTHER_JOB:
            raise AuthenticationError("it belongs to another job")
        if status == _Status.OTHER_ENCRYPTION:
            raise AuthenticationError(
                "it encrypts its connections, and this process does not: no certificate came with its key. "
                "Give all processes of the job the same key file (or --encrypt)"
            )
        if status != _Status.ACCEPTED:
            raise ProtocolError(f"it answered with status {status}, which means nothing here")
        if not hmac.compare_digest(proof, self._proof(b"responder", nonce)):
            raise AuthenticationError("it does not hold this job's key (or we hold the wrong one)")
        self.done = True
        return self._proof(b"initiator", nonce)

    def _proof(self, label: bytes, nonce: bytes) -> bytes:
        return _proof(self._key, label, self.greeting, nonce, self._binding)


class Responder:
    """The side that accepted. After :attr:`done`, :attr:`claim` is proven.

    Attributes:
        job: digest of the job whose ranks are welcome.
    """

    def __init__(self, key: bytes, job: bytes, random: Random = os.urandom, binding: bytes = b"") -> None:
        self._key = key
        self._job = job
        self._binding = binding
        self._random = random
        self._received = b""
        self._prelude: Optional[bytes] = None
        self._nonce = b""
        self._claim: Optional[Claim] = None
        self.done = False

    @property
    def claim(self) -> Claim:
        """What the initiator has proven to be."""
        if self._claim is None or not self.done:
            raise AuthenticationError("the handshake is not finished")
        return self._claim

    @property
    def challenged(self) -> bool:
        """Whether the initiator has named this job, and now has to prove that it holds its key."""
        return self._prelude is not None

    @property
    def needs(self) -> int:
        """How many bytes may be read now."""
        if self.done:
            return 0
        return (_PRELUDE.size if self._prelude is None else _PROOF_BYTES) - len(self._received)

    def receive(self, data: bytes) -> bytes:
        """Take at most :attr:`needs` bytes; return what to send (maybe nothing).

        Raises:
            AuthenticationError: the other side does not hold the key, or means another job.
            ProtocolError: it is not ringcomm, or another version. ``answer`` of the exception, if
                it has one, should be sent before closing: it tells the other side why.
        """
        self._received += data
        if self._prelude is None:
            if not MAGIC.startswith(self._received[: len(MAGIC)]):
                raise self._stranger()
            if len(self._received) < _PRELUDE.size:
                return b""
            return self._challenge()
        if len(self._received) < _PROOF_BYTES:
            return b""
        if not hmac.compare_digest(
            self._received, _proof(self._key, b"initiator", self._prelude, self._nonce, self._binding)
        ):
            raise AuthenticationError("it does not hold this job's key")
        self._received = b""
        self.done = True
        return b""

    def _stranger(self) -> Exception:
        if self._received.startswith(_TLS_HELLO) and not self._binding:
            return _refusal(
                ProtocolError("it encrypts, and no certificate came with this job's key"),
                _Status.OTHER_ENCRYPTION,
            )
        return ProtocolError("it does not speak ringcomm")

    def _challenge(self) -> bytes:
        prelude = self._received
        magic, version, purpose, generation, source, target, job, _ = _PRELUDE.unpack(prelude)
        if magic != MAGIC:
            raise ProtocolError("it does not speak ringcomm")
        if version != PROTOCOL_VERSION:
            raise _refusal(
                ProtocolError(f"it speaks version {version} of the protocol, not {PROTOCOL_VERSION}"),
                _Status.OTHER_VERSION,
            )
        if job != self._job:
            raise _refusal(AuthenticationError("it belongs to another job"), _Status.OTHER_JOB)
        self._prelude = prelude
        self._received = b""
        self._nonce = self._random(32)
        self._claim = Claim(purpose, job, generation, source, target)
        proof = _proof(self._key, b"responder", prelude, self._nonce, self._binding)
        return _CHALLENGE.pack(MAGIC, PROTOCOL_VERSION, _Status.ACCEPTED, self._nonce, proof)


def _refusal(problem: Exception, status: _Status) -> Exception:
    problem.answer = _CHALLENGE.pack(MAGIC, PROTOCOL_VERSION, status, _ZEROS, _ZEROS)  # type: ignore[attr-defined]
    return problem


def unencrypted_peer() -> Exception:
    """What to raise on an encrypted connection whose other end begins with :data:`MAGIC` in plain text."""
    return _refusal(
        AuthenticationError(
            "it does not encrypt, and this process does: its key comes with a certificate. Give all "
            "processes of the job the same key file (or --encrypt)"
        ),
        _Status.OTHER_ENCRYPTION,
    )


def parting_answer(problem: Exception) -> bytes:
    """What a responder still sends to the one it refuses, so that both sides know why."""
    answer = getattr(problem, "answer", b"")
    return answer if isinstance(answer, bytes) else b""
