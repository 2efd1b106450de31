"""The handshake that every connection starts with, as two state machines without I/O.

Both sides prove that they hold the job's key before either parses anything of variable length::

    initiator                                                    responder
        prelude: magic, version, claim, place, nonce_i     ->
                                 <-  challenge: magic, version, status, nonce_r, proof_r
        proof_i                                            ->

    proof_r = HMAC-SHA256(key, "responder" | prelude | nonce_r | binding)
    proof_i = HMAC-SHA256(key, "initiator" | prelude | nonce_r | binding)

The claim holds the purpose of the connection, its job and generation, and the ranks that it connects.
The place is the address and port that were dialled; without encryption a responder whose own socket has
another one refuses, so a process without the key that gets a rank to dial it cannot pass the proof on to
the real peer. (Inside TLS it could pass on ciphertext only.) Both are covered by both proofs, so they
cannot be altered; the two labels keep a proof from being reflected; the two nonces keep it from being
replayed; the binding, the fingerprint of the certificate on an encrypted connection and nothing on others,
keeps it from being used on the other kind. All three messages have a fixed size, 200 bytes together, so an
unauthenticated peer can cause neither parsing errors nor allocations.

On an encrypted connection this is inside TLS, whose first answer costs the responder a signature. So
the initiator sends an :class:`Admission` ahead of TLS: a tag that takes one hash to verify. A connection
that is to be relayed to another rank (:mod:`ringcomm.rendezvous.server`) starts with one that names both
ranks; admission, TLS and handshake with that rank follow.

Both ends derive a :class:`Session` from the key and the two nonces, which authenticates the control
messages that follow. A :class:`Signer` signs what a job's processes hand to each other in other ways.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import struct
from enum import IntEnum
from typing import Callable, NamedTuple, Optional, Set, Union

from ..errors import AuthenticationError, ProtocolError

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


_PLACE = struct.Struct("!BxH16s")
NOWHERE = bytes(_PLACE.size)
"""The place of a connection that was not dialled, like one of a pair of sockets."""
_UNIX, _IPV4, _IPV6 = 1, 4, 6


def place_of(address: str, port: int) -> bytes:
    """Return the 20 bytes for an address and a port, as dialled or as bound. The address is numeric, or ``@``
    and the name of an abstract Unix socket, of which only a digest is stored.
    """
    if address.startswith("@"):
        return _PLACE.pack(_UNIX, 0, hashlib.sha256(address.encode("utf-8")).digest()[:16])
    numeric = ipaddress.ip_address(address.split("%")[0])
    return _PLACE.pack(_IPV4 if numeric.version == 4 else _IPV6, port, numeric.packed.ljust(16, b"\0"))


def describe_place(place: bytes) -> str:
    """Return a place for people to read."""
    kind, port, packed = _PLACE.unpack(place)
    if kind == _IPV4:
        return f"{ipaddress.IPv4Address(packed[:4])}:{port}"
    if kind == _IPV6:
        return f"[{ipaddress.IPv6Address(packed)}]:{port}"
    return "a Unix socket" if kind == _UNIX else "no address"


MAGIC = b"ringcomm"
JOIN_MAGIC = b"ringjoin"
"""The first bytes of a machine that joins, which the launcher takes (:mod:`ringrun.join.proof`)."""
PROTOCOL_VERSION = 6
"""Hosts with different versions refuse each other. It changes with the format of any message."""

_PRELUDE = struct.Struct("!8sHHIii16s20s32s")
_CHALLENGE = struct.Struct("!8sHH32s32s")
_CHALLENGE_HEAD = struct.Struct("!8sHH")
_PROOF_BYTES = 32
_ZEROS = bytes(32)
_NO_PROOF = bytes(_PROOF_BYTES)
"""Sent by an initiator instead of its proof if that of the responder is wrong."""

Random = Callable[[int], bytes]

_FORWARDING = (
    "If port forwarding or NAT between the hosts is meant to do that, encrypt the job (--encrypt); otherwise "
    "a process that is not part of the job does"
)
_OTHER_KEY = "it does not hold this job's key (or this process has the wrong one)"


class _Status(IntEnum):
    ACCEPTED = 0
    OTHER_VERSION = 1
    OTHER_JOB = 2
    OTHER_ENCRYPTION = 3
    OTHER_PLACE = 4
    OTHER_KEY = 5


_TOLD = {
    _Status.OTHER_JOB: "it belongs to another job",
    _Status.OTHER_ENCRYPTION: "it encrypts its connections, and this process does not: no certificate came "
    "with its key. Give all processes of the job the same key file (or --encrypt)",
    _Status.OTHER_PLACE: "the connection was not accepted where {place} is, but passed on from there to "
    f"another address. {_FORWARDING}",
}
"""Why the responder refuses the initiator, in the words of the latter's error."""
_ADMISSION = struct.Struct("!4s16s16s")
_ADMISSION_MAGIC, _PASSAGE_MAGIC = b"\x02rct", b"\x02rcl"
_PASSAGE = struct.Struct("!H16sIii")
"""At the end of an admission to the relay: purpose, job, generation, the rank that asks, the other one."""
UNENCRYPTED = "it does not encrypt as this job's processes do"
"""Why a peer that does not use TLS 1.3 is refused."""


class OtherVersion(ProtocolError):
    """The responder uses another version of the protocol."""


def _proof(key: bytes, label: bytes, prelude: bytes, nonce: bytes, binding: bytes = b"") -> bytes:
    return hmac.new(key, label + b"\0" + prelude + nonce + binding, hashlib.sha256).digest()


class Admission:
    """The bytes that a responder reads ahead of TLS: a nonce, and a tag that takes the job's key to make. It
    keeps other processes from having TLS answered, and is no proof: a process on the wire can replay it, once
    to each responder without the original. ``used`` has the admitted nonces, ``passage`` the link to relay.
    """

    def __init__(self, key: bytes, used: Set[bytes]) -> None:
        self.passage: Optional[Claim] = None
        self._key = key
        self._used = used
        self._received = b""

    @property
    def needs(self) -> int:
        """Return how many bytes may be read now; 0 when the tag has been verified."""
        more = _PASSAGE.size if self._received.startswith(_PASSAGE_MAGIC) else 0
        return _ADMISSION.size + more - len(self._received)

    def receive(self, data: bytes) -> None:
        """Take at most :attr:`needs` bytes. Raises AuthenticationError if the other side does not hold the
        key or does not encrypt, ProtocolError if it is not ringcomm, or sends a replay.
        """
        self._received += data
        if self._received.startswith(MAGIC):
            raise unencrypted_peer()
        known = (MAGIC, _ADMISSION_MAGIC, _PASSAGE_MAGIC)
        if not any(magic.startswith(self._received[: len(magic)]) for magic in known):
            raise ProtocolError(UNENCRYPTED)
        if not self.needs:
            _, nonce, tag = _ADMISSION.unpack_from(self._received)
            passage = self._received[_ADMISSION.size :]
            if not hmac.compare_digest(tag, _admission_tag(self._key, nonce + passage)):
                raise _refusal(AuthenticationError("it does not hold this job's key"), _Status.OTHER_KEY)
            if nonce in self._used:
                raise ProtocolError("it sends a copy of what another connection has begun with")
            self._used.add(nonce)
            if passage:
                self.passage = Claim(*_PASSAGE.unpack(passage))

    @staticmethod
    def of(key: bytes, random: Random = os.urandom, passage: Optional[Claim] = None) -> bytes:
        """Return the bytes that an initiator sends. ``passage``: the link that is to be relayed."""
        nonce, link = random(16), b""
        if passage is not None:
            link = _PASSAGE.pack(*passage)
        magic = _PASSAGE_MAGIC if link else _ADMISSION_MAGIC
        return _ADMISSION.pack(magic, nonce, _admission_tag(key, nonce + link)) + link


def _admission_tag(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, b"admission\0" + content, "sha256")[:16]


def plain_answer(head: bytes) -> Optional[Exception]:
    """Return the error if ``head`` begins a refusal in plain text, to an initiator that uses TLS."""
    if not head.startswith(MAGIC) or len(head) < _CHALLENGE_HEAD.size:
        return None
    if _CHALLENGE_HEAD.unpack_from(head)[2] == _Status.OTHER_KEY:
        return AuthenticationError(_OTHER_KEY)
    return unencrypted_peer()


class Initiator:
    """The side that connected.

    Send :attr:`greeting`, then read exactly :attr:`needs` bytes, give them to :meth:`receive` and send what
    it returns; then :attr:`done` is true, and :attr:`session` authenticates the messages that follow.
    ``place`` is the dialled one, from :func:`place_of`.
    """

    session: Session

    def __init__(
        self, key: bytes, claim: Claim, random: Random = os.urandom, binding: bytes = b"",
        place: bytes = NOWHERE,
    ) -> None:  # fmt: skip
        self._key, self._binding, self._place = key, binding, place
        self.greeting = _PRELUDE.pack(
            MAGIC, PROTOCOL_VERSION, claim.purpose, claim.generation, claim.source, claim.target, claim.job,
            place, random(32),
        )  # fmt: skip
        self._received = b""
        self.done = False

    @property
    def needs(self) -> int:
        """Return how many bytes may be read now; more would belong to the messages after the handshake."""
        return 0 if self.done else _CHALLENGE.size - len(self._received)

    def receive(self, data: bytes) -> bytes:
        """Take at most :attr:`needs` bytes; return what to send (maybe nothing yet). Raises
        AuthenticationError if the other side does not hold this job's key (see :func:`parting_answer`),
        ProtocolError if it is not ringcomm, or another version.
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
            raise OtherVersion(
                f"it uses version {version} of ringcomm's protocol and this process version "
                f"{PROTOCOL_VERSION}; install the same ringcomm on both hosts"
            )
        if status in _TOLD:
            raise AuthenticationError(_TOLD[status].format(place=describe_place(self._place)))
        if status != _Status.ACCEPTED:
            raise ProtocolError(f"it answered with the unknown status {status}")
        if not hmac.compare_digest(proof, self._proof(b"responder", nonce)):
            raise _answered(AuthenticationError(_OTHER_KEY), _NO_PROOF)
        self.session = session_of(self._proof(b"session", nonce), True)
        self.done = True
        return self._proof(b"initiator", nonce)

    def _proof(self, label: bytes, nonce: bytes) -> bytes:
        return _proof(self._key, label, self.greeting, nonce, self._binding)


class Responder:
    """The side that accepted. ``place`` of this end must be the dialled one; None: it is encrypted."""

    claim: Claim  # of the initiator, once it is authenticated
    session: Session  # then authenticates the messages that follow

    def __init__(
        self, key: bytes, job: bytes, random: Random = os.urandom, binding: bytes = b"",
        place: Optional[bytes] = NOWHERE,
    ) -> None:  # fmt: skip
        self._key, self._job, self._random = key, job, random
        self._binding, self._place = binding, place
        self._received = self._nonce = b""
        self._prelude: Optional[bytes] = None
        self.done = False

    @property
    def challenged(self) -> bool:
        """Return whether the initiator has named this job, and now must prove that it holds its key."""
        return self._prelude is not None

    @property
    def needs(self) -> int:
        """Return how many bytes may be read now."""
        if self.done:
            return 0
        return (_PRELUDE.size if self._prelude is None else _PROOF_BYTES) - len(self._received)

    def receive(self, data: bytes) -> bytes:
        """Take at most :attr:`needs` bytes; return what to send, if anything. AuthenticationError: the other
        side does not hold the key, or belongs to another job; ProtocolError: it is not ringcomm, or another
        version. :func:`parting_answer` of the error should be sent before closing.
        """
        self._received += data
        if self._prelude is None:
            if not MAGIC.startswith(self._received[: len(MAGIC)]):
                raise self._not_ringcomm()
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
        secret = _proof(self._key, b"session", self._prelude, self._nonce, self._binding)
        self.session = session_of(secret, False)
        _, _, purpose, generation, source, target, job, _, _ = _PRELUDE.unpack(self._prelude)
        self.claim = Claim(purpose, job, generation, source, target)
        self.done = True
        return b""

    def _not_ringcomm(self) -> Exception:
        if self._received.startswith(_ADMISSION_MAGIC[:1]) and not self._binding:
            return _refusal(
                ProtocolError("it encrypts, and no certificate came with this job's key"),
                _Status.OTHER_ENCRYPTION,
            )
        return ProtocolError("it does not use ringcomm's protocol")

    def _challenge(self) -> bytes:
        prelude = self._received
        magic, version, _, _, _, _, job, place, _ = _PRELUDE.unpack(prelude)
        if magic != MAGIC:
            raise ProtocolError("it does not use ringcomm's protocol")
        if version != PROTOCOL_VERSION:
            raise _refusal(
                ProtocolError(f"it uses version {version} of the protocol, not {PROTOCOL_VERSION}"),
                _Status.OTHER_VERSION,
            )
        if job != self._job:
            raise _refusal(AuthenticationError("it belongs to another job"), _Status.OTHER_JOB)
        if self._place is not None and place != self._place:
            raise _refusal(
                AuthenticationError(
                    f"it dialled {describe_place(place)}, and this is {describe_place(self._place)}: the "
                    f"connection was passed on. {_FORWARDING}"
                ),
                _Status.OTHER_PLACE,
            )
        self._prelude = prelude
        self._received = b""
        self._nonce = self._random(32)
        proof = _proof(self._key, b"responder", prelude, self._nonce, self._binding)
        return _CHALLENGE.pack(MAGIC, PROTOCOL_VERSION, _Status.ACCEPTED, self._nonce, proof)


def _refusal(problem: Exception, status: _Status) -> Exception:
    return _answered(problem, _CHALLENGE.pack(MAGIC, PROTOCOL_VERSION, status, _ZEROS, _ZEROS))


def _answered(problem: Exception, answer: bytes) -> Exception:
    problem.answer = answer  # type: ignore[attr-defined]
    return problem


def unencrypted_peer() -> Exception:
    """Return the error for an encrypted connection whose other end sends :data:`MAGIC` in plain text."""
    return _refusal(
        AuthenticationError(
            "it does not encrypt, and this process does: its key comes with a certificate. Give all "
            "processes of the job the same key file (or --encrypt)"
        ),
        _Status.OTHER_ENCRYPTION,
    )


def parting_answer(problem: Exception) -> bytes:
    """Return the bytes that a side sends to the peer that it refuses: the reason, if there is one."""
    answer = getattr(problem, "answer", b"")
    return answer if isinstance(answer, bytes) else b""


# ---- after the handshake -------------------------------------------------------------------------

_TAG_BYTES = 16
_NUMBER = struct.Struct("!Q")


class Session:
    """Authenticates the control messages of one connection: one that is altered, left out, repeated,
    reordered or sent back is refused. A tag is a keyed BLAKE2b of the message's number in its direction (from
    0) and its bytes, which takes less than half the time of HMAC-SHA256.
    """

    TAG_BYTES = _TAG_BYTES

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0

    def tag(self, message: bytes) -> bytes:
        """Return the tag of the next message to send."""
        number, self._sent = self._sent, self._sent + 1
        return _tag(self._sending, number, message)

    def check(self, message: bytes, tag: bytes) -> None:
        """Count a received message; raises ProtocolError if its tag is wrong."""
        if not hmac.compare_digest(tag, _tag(self._receiving, self._received, message)):
            raise ProtocolError(
                f"control message number {self._received + 1} on this connection does not carry the tag of "
                "its sender: another process has changed it on the way"
            )
        self._received += 1


def _tag(key: bytes, number: int, message: bytes) -> bytes:
    return hashlib.blake2b(_NUMBER.pack(number) + message, key=key, digest_size=_TAG_BYTES).digest()


def session_of(secret: bytes, initiator: bool) -> Session:
    """Return one end's session, by the secret that both ends derive from the key and the two nonces."""
    there, back = (hmac.digest(secret, label, "sha256") for label in (b"to responder", b"to initiator"))
    return Session(there, back) if initiator else Session(back, there)


class Signer:
    """Signs bytes that the processes of one job hand to each other, over any carrier."""

    SIGNATURE_BYTES = 32

    def __init__(self, key: bytes, job: str = "", generation: int = 0) -> None:
        scope = b"ringcomm signature\0" + repr((job, generation)).encode("utf-8")
        self._hmac = hmac.new(hmac.digest(key, scope, "sha256"), digestmod="sha256")

    def sign(self, data: Union[bytes, memoryview], *about: object) -> bytes:
        """Return the signature. ``about``: texts and numbers that identify the bytes: kind, name, source."""
        context = repr(about).encode("utf-8")
        signed = self._hmac.copy()
        # The length keeps a part of one from counting as a part of the other. The bytes are not copied.
        signed.update(_NUMBER.pack(len(context)) + context)
        signed.update(data)
        return signed.digest()

    def verifies(self, data: Union[bytes, memoryview], signature: bytes, *about: object) -> bool:
        """Return whether this job has signed these bytes for the same use."""
        return hmac.compare_digest(signature, self.sign(data, *about))
