"""Control messages between engines, over links."""

from __future__ import annotations

from typing import Collection, Dict, List, Optional, Set, Tuple

from ..transport.base import Fabric, Link, LinkClosed
from ..wire.messages import MAX_RESPONSES_BYTES, Message, MessageReader, body_of, framed, repeat_framed

_READ_BYTES = 64 * 1024


class ControlMessages:
    """Queues of outgoing control messages, and readers of arriving ones. No method waits.

    ``nearest`` are the peers of the negotiation; ``gone`` has those whose link has ended, with the reason.
    """

    def __init__(self, fabric: Fabric, nearest: Collection[int]) -> None:
        self.gone: Dict[int, str] = {}
        self._nearest = frozenset(nearest)
        self._links: Dict[int, Link] = {
            peer: fabric.link(peer) for peer in range(fabric.size) if peer != fabric.rank
        }
        self._end_found: Set[int] = set()
        self._readers = {
            peer: MessageReader(MAX_RESPONSES_BYTES, link.session, repeats=True)
            for peer, link in self._links.items()
        }
        self._unsent: Dict[int, bytearray] = {peer: bytearray() for peer in self._links}
        # Bytes that a link was given and has not accepted yet. The peer may read them in place, so they
        # must not move.
        self._given: Dict[int, memoryview] = {peer: memoryview(b"") for peer in self._links}
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def send(self, message: Message, to: Optional[int] = None) -> None:
        """Send to one peer, or to the nearest ones as far as they are still there."""
        self._send_to(message, self._nearest if to is None else (to,))

    def send_all(self, message: Message) -> None:
        """Send to every peer that is still there."""
        self._send_to(message, tuple(self._links))

    def send_repeat(self, message: Message, elements: memoryview) -> None:
        """Send a message of the kind ``repeat`` and its elements to every peer that is still there."""
        for peer, link in self._links.items():
            if peer not in self._end_found:
                self._unsent[peer] += repeat_framed(message, link.session)
                self._unsent[peer] += elements
        self.flush()

    def _send_to(self, message: Message, peers: Collection[int]) -> None:
        body = body_of(message)
        for peer in peers:
            if peer in self._links and peer not in self._end_found:
                self._unsent[peer] += framed(body, self._links[peer].session)
        self.flush()

    def flush(self) -> None:
        """Give the links as many bytes as they accept now."""
        for peer, unsent in self._unsent.items():
            while unsent or self._given[peer]:
                if not self._given[peer]:
                    self._given[peer] = memoryview(bytes(unsent))
                    unsent.clear()
                try:
                    taken = self._links[peer].send([self._given[peer]])
                except LinkClosed:
                    # Receiving finds the end too, after the peer's last messages.
                    self._end_found.add(peer)
                    self._forget(peer)
                    break
                if not taken:
                    break
                self._given[peer] = self._given[peer][taken:]

    def _forget(self, peer: int) -> None:
        """Drop what is queued for the peer."""
        self._unsent[peer].clear()
        self._given[peer] = memoryview(b"")

    def has_unsent(self) -> bool:
        """Return whether the links have not taken all that was sent."""
        return any(self._unsent.values()) or any(self._given.values())

    def receive(self, all_peers: bool = True) -> List[Tuple[int, Message]]:
        """Return all messages that have arrived, each with its sender.

        ``all_peers``: read from every peer, not only from the nearest; that costs a system call per peer.
        """
        messages: List[Tuple[int, Message]] = []
        for peer, link in list(self._links.items()):
            if not all_peers and peer not in self._nearest:
                continue
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
        self._forget(peer)

    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        """The links to wait for: (readable, writable)."""
        reading = list(self._links.values())
        unsent = [link for peer, link in self._links.items() if self._unsent[peer] or self._given[peer]]
        return reading, unsent
