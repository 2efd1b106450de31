"""Authenticates bytes after the handshake: control messages of a connection, and objects that a job signs."""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Union

from ..errors import ProtocolError

_TAG_BYTES = 16
_NUMBER = struct.Struct("!Q")


class Session:
    """Authenticates the control messages of one connection, in each direction, in order.

    A message's tag is a keyed BLAKE2b of its number in its direction (from 0) and its bytes, which takes less
    than half the time of HMAC-SHA256. So a message that is altered, left out, repeated, reordered or sent
    back to its sender is refused.
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
    """Return the session of one end of a connection. The secret is derived from the key and both nonces, and
    shared by the two ends only; ``initiator``: this end has dialled.
    """
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
