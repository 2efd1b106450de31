"""Which message belongs to which receive. Pure: no socket, no thread, no tensor."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Tuple

Address = Tuple[int, int]
"""Whose tags (the user's, or our own) and the tag."""


class Arrival(NamedTuple):
    """A message that has come, or that is announced.

    Attributes:
        peer: who sent it.
        address: the tag.
        number: the sender's number for it.
        nbytes: its length.
        content: the bytes, or None if they wait at the sender's until they are asked for.
    """

    peer: int
    address: Address
    number: int
    nbytes: int
    content: Optional[memoryview]


class Receive:
    """A receive that has been posted.

    Args:
        peer: from whom, or None for anybody.
        address: with which tag.
        view: where the bytes go.
        work: whatever belongs to it.
    """

    __slots__ = ("address", "peer", "view", "work")

    def __init__(self, peer: Optional[int], address: Address, view: memoryview, work: Any) -> None:
        self.peer = peer
        self.address = address
        self.view = view
        self.work = work


class Matcher:
    """Receives without a message, and messages without a receive, in the order in which they came.

    Messages of one sender with one tag are received in the order in which they were sent.
    """

    def __init__(self) -> None:
        self._receives: Dict[Address, Deque[Receive]] = {}
        self._arrivals: Dict[Address, Deque[Arrival]] = {}
        self._held: Dict[int, int] = {}

    def post(self, receive: Receive) -> Optional[Arrival]:
        """A receive is posted: the message that it gets, if that is here; otherwise it waits."""
        arrivals = self._arrivals.get(receive.address, ())
        for arrival in arrivals:
            if receive.peer in (None, arrival.peer):
                self._arrivals[receive.address].remove(arrival)
                if arrival.content is not None:
                    self._held[arrival.peer] -= arrival.nbytes
                return arrival
        self._receives.setdefault(receive.address, deque()).append(receive)
        return None

    def match(self, peer: int, address: Address) -> Optional[Receive]:
        """A message begins to arrive: the receive that gets it, if there is one."""
        for receive in self._receives.get(address, ()):
            if receive.peer in (None, peer):
                self.withdraw(receive)
                return receive
        return None

    def hold(self, arrival: Arrival) -> None:
        """Nobody has asked for this message yet."""
        self._arrivals.setdefault(arrival.address, deque()).append(arrival)
        if arrival.content is not None:
            self._held[arrival.peer] = self._held.get(arrival.peer, 0) + arrival.nbytes

    def held_bytes(self, peer: int) -> int:
        """How much of this peer's messages nobody has asked for yet."""
        return self._held.get(peer, 0)

    def withdraw(self, receive: Receive) -> None:
        """A receive waits no longer."""
        queue = self._receives[receive.address]
        queue.remove(receive)
        if not queue:
            del self._receives[receive.address]

    def receives(self) -> List[Receive]:
        """Those that wait."""
        return [receive for queue in self._receives.values() for receive in queue]
