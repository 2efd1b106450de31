"""The interface of encrypted connections. The implementation is in :mod:`.tls`.

That module needs Python's ``ssl``, which some builds lack and which is slow to import. So only
:func:`encryption_of` imports it, and only for jobs that encrypt.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from typing import Optional

from ..errors import ConfigError, ProtocolError


class ClosedEarly(ProtocolError):
    """The other end closed the connection before the handshake was over."""


class SecureSocket(socket.socket):
    """A connected socket whose bytes are encrypted. Used like any other, as far as ringcomm does.

    ``send``, ``sendall``, ``sendmsg``, ``recv``, ``recv_into`` and ``recvmsg_into`` take and give plain
    bytes; a call that needs the other end to continue raises BlockingIOError, or waits if there is a timeout.
    """

    secured: bool  # the handshake is over; before, nothing may be sent or received

    def handshake(self) -> bool:
        """Continue the handshake without waiting; return whether it is over. Raises AuthenticationError if
        the other end does not show this job's certificate or does not encrypt, ProtocolError if it is not
        ringcomm (:class:`ClosedEarly`: it has closed the connection), OSError if the connection broke.
        """
        raise NotImplementedError

    def buffered(self) -> bool:
        """Return whether a receive may return bytes that have left the system's buffers, which waiting for
        the socket would not report. May be wrong until the next receive.
        """
        raise NotImplementedError

    def trust(self) -> None:
        """Lift the limits on what an authenticated peer may send."""
        raise NotImplementedError


class Encryption(ABC):
    """How this process encrypts the connections of its job."""

    fingerprint: bytes  # SHA-256 of the job's certificate; both ends' proofs cover it

    @abstractmethod
    def wrap(self, sock: socket.socket, accepted: bool) -> SecureSocket:
        """Take over a non-blocking socket, connected or not yet. ``accepted``: the other end dialled."""


def encryption_of(certificate: str, insist: bool = False) -> Optional[Encryption]:
    """Return how to encrypt a job's connections, or None. Raises ConfigError if the certificate (PEM, with
    its private key) cannot be used, or if it is missing and ``insist`` (``RINGCOMM_ENCRYPT``) is set.
    """
    if not certificate:
        if insist:
            raise ConfigError(
                "RINGCOMM_ENCRYPT=1, but no certificate came with the job's key. Make a key file that has "
                "one (`python -m ringcomm.newkey --encrypt FILE`), copy it to every host and set "
                "RINGCOMM_KEY_FILE; or start the program with `ringrun --encrypt`, which does that."
            )
        return None
    try:
        from .tls import Tls
    except ImportError as problem:
        raise ConfigError(f"This Python was built without ssl, so it cannot encrypt: {problem}.") from None
    return Tls(certificate)
