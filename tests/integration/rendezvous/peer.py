"""A process with the key of a job that sends a server what the test says."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from ringcomm.rendezvous.client import reach
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Claim, Purpose, job_digest
from ringcomm.wire.messages import MAX_MESSAGE_BYTES, MessageReader, encode

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

    def until(self, kind: str) -> Message:
        """The first message of this kind; those before it are dropped."""
        while True:
            messages = self.next()
            assert messages is not None, f"no {kind!r} has come"
            for message in messages:
                if message["type"] == kind:
                    return message

    def read(self) -> List[Message]:
        """All messages up to the end of the connection."""
        found: List[Message] = []
        while True:
            messages = self.next()
            if messages is None:
                return found
            found += messages
