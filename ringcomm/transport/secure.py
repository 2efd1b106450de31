"""What the rest needs to know of encrypted connections. How they are encrypted is in :mod:`.tls`.

That module needs Python's ``ssl``, which some builds lack and which nobody should have to wait for who does
not encrypt. So it is imported by :func:`encryption_of`, and by nobody else.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod

UNENCRYPTED = "it does not encrypt as this job's processes do"
"""Why somebody is refused who does not speak TLS 1.3."""


class SecureSocket(socket.socket):
    """A connected socket whose bytes are encrypted. It is used like any other, as far as ringcomm does.

    ``send``, ``sendall``, ``sendmsg``, ``recv``, ``recv_into`` and ``recvmsg_into`` take and give plain
    bytes; whatever cannot go on without the other end raises BlockingIOError, or waits if there is a timeout.

    Attributes:
        secured: whether the handshake is over. Before, nothing may be sent or received.
        answered: whether anything of a handshake was worth an answer. That is what takes time.
    """

    secured: bool
    answered: bool

    def handshake(self) -> bool:
        """Go on with the handshake as far as it goes now; whether it is over.

        Raises:
            AuthenticationError: the other end does not show this job's certificate, or does not encrypt.
            ProtocolError: it is not ringcomm.
            OSError: the connection broke.
        """
        raise NotImplementedError

    def buffered(self) -> bool:
        """Whether a receive may give something that the system knows nothing of any more.

        Nothing would wake up whoever sleeps then. It may be wrong until the next receive.
        """
        raise NotImplementedError

    def trust(self) -> None:
        """The other end has proven itself: let it send as much as it likes."""
        raise NotImplementedError

    def send_plain(self, data: bytes) -> None:
        """Send a few bytes as they are, to somebody who does not encrypt."""
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
