"""A rendezvous that sends one rank whatever the test says, and the messages of a start."""

from __future__ import annotations

import socket
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ringcomm.config import Membership, Slot
from ringcomm.rendezvous.client import reach
from ringcomm.transport.connect import listen, place_here
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Claim, Purpose, Responder, job_digest
from ringcomm.wire.messages import MAX_MESSAGE_BYTES, MessageReader, encode

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

    def close(self) -> None:
        """Close all."""
        self.listener.close()
        if self.sock is not None:
            self.sock.close()


# ---- a process with the key of a job that sends a server what the test says --------------------


Message = Dict[str, Any]


class Peer:
    """A connection to a server, after the handshake."""

    def __init__(
        self, endpoints: Sequence[Tuple[str, int]], key: bytes, job: str, purpose: Purpose = Purpose.CONTROL
    ) -> None:
        reactor = Reactor()
        found = reach(reactor, endpoints, key, Claim(purpose, job_digest(job)), None, 30.0)
        reactor.close()
        assert found.sock is not None, found.tried
        self.sock, self.session = found.sock, found.session
        self.sock.settimeout(30.0)
        self._reader = MessageReader(MAX_MESSAGE_BYTES, self.session)

    def send(self, *messages: Message) -> None:
        """Send messages in one piece."""
        self.sock.sendall(b"".join(encode(message, self.session) for message in messages))

    def next(self) -> Optional[List[Message]]:
        """The next messages; None if the connection is closed."""
        while True:
            data = self.sock.recv(1 << 16)
            found = list(self._reader.feed(data)) if data else None
            if found != []:
                return found

    def read(self) -> List[Message]:
        """All messages up to the end of the connection."""
        found: List[Message] = []
        while True:
            messages = self.next()
            if messages is None:
                return found
            found += messages
