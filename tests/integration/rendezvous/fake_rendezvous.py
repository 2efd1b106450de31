"""A rendezvous that sends one rank whatever the test says, and the messages of a start."""

from __future__ import annotations

import socket
import struct
from typing import Any, Dict, Optional

from ringcomm.config import Membership, Slot
from ringcomm.transport.connect import listen, place_here
from ringcomm.wire.auth import Responder, job_digest
from ringcomm.wire.messages import MessageReader, encode

KEY = b"k" * 32
PROBE: Dict[str, Any] = {
    "type": "probe",
    "rank": 0,
    "generation": 0,
    "members": [{"rank": 0, "host": "here", "host_index": 0, "local_rank": 0, "pid": 1}],
    "targets": [],
}
LINK: Dict[str, Any] = {"type": "link", "routes": []}
GO = {"type": "go", "table": ""}


class FakeRendezvous:
    """Listens for one rank, which has a place of a launcher (`membership`)."""

    def __init__(self) -> None:
        self.listener = listen("127.0.0.1")
        self.listener.settimeout(30.0)
        where = self.listener.getsockname()[:2]
        self.membership = Membership(2, (where,), KEY, "job", Slot(0, 0))
        self.sock: Optional[socket.socket] = None
        self.session: Any = None

    def accept(self) -> None:
        """Take the next connection, and go through the handshake."""
        if self.sock is not None:
            self.sock.close()
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(30.0)
        responder = Responder(KEY, job_digest("job"), place=place_here(self.sock))
        while not responder.done:
            self.sock.sendall(responder.receive(self._bytes(responder.needs)))
        self.session = responder.session
        self._reader = MessageReader(100_000, self.session)

    def read(self, kind: str) -> Dict[str, Any]:
        """The next message, which must be of this kind; only one is on its way."""
        while True:
            for message in self._reader.feed(self._bytes(65536)):
                assert message["type"] == kind
                return message

    def _bytes(self, most: int) -> bytes:
        assert self.sock is not None
        data = self.sock.recv(most)
        assert data, "the rank has closed its connection"
        return data

    def send(self, *messages: Dict[str, Any]) -> None:
        """Send messages in one piece."""
        assert self.sock is not None
        self.sock.sendall(b"".join(encode(message, self.session) for message in messages))

    def reset(self) -> None:
        """End the connection as the system does when the process has been killed with bytes unread."""
        assert self.sock is not None
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        """Close all."""
        self.listener.close()
        if self.sock is not None:
            self.sock.close()
