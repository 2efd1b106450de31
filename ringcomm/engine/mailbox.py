"""Control messages between the engine of rank 0 and the others, over links."""

from __future__ import annotations

from typing import Dict, Iterable, List, Optional, Tuple

from ..transport.base import Fabric, Link, LinkClosed
from ..wire.messages import MAX_ORDERS_BYTES, Message, MessageReader, encode

_READ_BYTES = 64 * 1024


class Mailbox:
    """What is to be sent, and what has arrived. Nothing here waits.

    Attributes:
        gone: peers whose link has ended, with the reason.
    """

    def __init__(self, fabric: Fabric, peers: Iterable[int]) -> None:
        self.gone: Dict[int, str] = {}
        self._links: Dict[int, Link] = {peer: fabric.link(peer) for peer in peers}
        self._readers = {peer: MessageReader(MAX_ORDERS_BYTES) for peer in self._links}
        self._unsent: Dict[int, bytearray] = {peer: bytearray() for peer in self._links}
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def send(self, message: Message, to: Optional[int] = None) -> None:
        """Send to one peer, or to every one that is still there: all on rank 0, otherwise rank 0."""
        data = encode(message)
        for peer in self._links:
            if to is None or peer == to:
                self._unsent[peer] += data
        self.flush()

    def flush(self) -> None:
        """Hand over to the links what they take now."""
        for peer, unsent in self._unsent.items():
            while unsent and peer in self._links:
                try:
                    taken = self._links[peer].send([memoryview(bytes(unsent))])
                except LinkClosed as closed:
                    self._lose(peer, closed.reason)
                    break
                if not taken:
                    break
                del unsent[:taken]

    def receive(self) -> List[Tuple[int, Message]]:
        """All messages that have arrived, with who sent them.

        Raises:
            ProtocolError: somebody sent nonsense.
        """
        messages: List[Tuple[int, Message]] = []
        for peer, link in list(self._links.items()):
            try:
                while True:
                    got = link.recv([self._buffer])
                    if not got:
                        break
                    messages += [(peer, item) for item in self._readers[peer].feed(bytes(self._buffer[:got]))]
                    if got < _READ_BYTES:
                        break
            except LinkClosed as closed:
                self._lose(peer, closed.reason)
        return messages

    def _lose(self, peer: int, reason: str) -> None:
        self.gone[peer] = reason
        del self._links[peer]
        self._unsent[peer].clear()

    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        """The links to wait for: (readable, writable)."""
        reading = list(self._links.values())
        return reading, [self._links[peer] for peer, unsent in self._unsent.items() if unsent]
