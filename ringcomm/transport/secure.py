"""The interface of encrypted connections. The implementation is in :mod:`.tls`.

That module needs Python's ``ssl``, which some builds lack and which takes long to import. So only
:func:`~ringcomm.transport.encryption.encryption_of` imports it, and only for jobs that encrypt.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod

from ..errors import ProtocolError


class ClosedEarly(ProtocolError):
    """The other end has closed the connection before the handshake was over."""


class SecureSocket(socket.socket):
    """A connected socket whose bytes are encrypted. It is used like any other, as far as ringcomm does.

    ``send``, ``sendall``, ``sendmsg``, ``recv``, ``recv_into`` and ``recvmsg_into`` take and give plain
    bytes; whatever cannot go on without the other end raises BlockingIOError, or waits if there is a timeout.

    Attributes:
        secured: whether the handshake is over. Before, nothing may be sent or received.
        answered: whether this end has sent a part of the handshake, which is what takes processor time.
    """

    secured: bool
    answered: bool

    def handshake(self) -> bool:
        """Go on with the handshake as far as possible without waiting; return whether it is over.

        Raises:
            AuthenticationError: the other end does not show this job's certificate, or does not encrypt.
            ProtocolError: it is not ringcomm.
            ClosedEarly: it has closed the connection.
            OSError: the connection broke.
        """
        raise NotImplementedError

    def buffered(self) -> bool:
        """Return whether a receive may return bytes that have left the system's buffers already.

        Waiting for the socket would not report such bytes. The answer may be wrong until the next receive.
        """
        raise NotImplementedError

    def trust(self) -> None:
        """Lift the limits on what the other end may send: it has authenticated itself."""
        raise NotImplementedError

    def send_plain(self, data: bytes) -> None:
        """Send a few bytes as they are, to a peer that does not encrypt."""
        raise NotImplementedError


class Encryption(ABC):
    """How this process encrypts the connections of its job.

    Attributes:
        fingerprint: SHA-256 of the job's certificate. Both ends' proofs cover it.
    """

    fingerprint: bytes

    @abstractmethod
    def wrap(self, sock: socket.socket, accepted: bool) -> SecureSocket:
        """Take a non-blocking socket over, connected or not yet.

        Args:
            accepted: whether the other end dialled.
        """
