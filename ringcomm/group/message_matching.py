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
        elements: code of their type.
        nbytes: its length.
        content: the bytes, or None if they wait at the sender's until they are asked for.
    """

    peer: int
    address: Address
    number: int
    elements: int
    nbytes: int
    content: Optional[memoryview] = None


class Receive:
    """A receive that has been posted.

    Args:
        peer: from whom, or None for anybody.
        address: with which tag.
        view: where the bytes go.
        work: whatever belongs to it.
        elements: code of their type.
    """

    __slots__ = ("address", "elements", "peer", "view", "work")

    def __init__(
        self, peer: Optional[int], address: Address, view: memoryview, work: Any, elements: int = 0
    ) -> None:
        self.peer = peer
        self.address = address
        self.view = view
        self.work = work
        self.elements = elements


class Matcher:
    """Receives without a message, and messages without a receive, in the order in which they came.

    Messages of one sender with one tag are received in the order in which they were sent.
    """

    def __init__(self) -> None:
        self._receives: Dict[Address, Deque[Receive]] = {}
        self._arrivals: Dict[Address, Deque[Arrival]] = {}

    def post(self, receive: Receive) -> Optional[Arrival]:
        """A receive is posted: the message that it gets, if that is here; otherwise it waits."""
        arrivals = self._arrivals.get(receive.address)
        for arrival in arrivals or ():
            if receive.peer in (None, arrival.peer):
                _remove(self._arrivals, receive.address, arrival)
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

    def withdraw(self, receive: Receive) -> None:
        """A receive waits no longer."""
        _remove(self._receives, receive.address, receive)

    def receives(self) -> List[Receive]:
        """Those that wait."""
        return [receive for queue in self._receives.values() for receive in queue]


def _remove(queues: Dict[Address, Deque[Any]], address: Address, item: Any) -> None:
    """Take an item out of its queue; a queue that is empty goes, since a program may use ever new tags."""
    queue = queues[address]
    for index, other in enumerate(queue):
        if other is item:
            del queue[index]
            break
    if not queue:
        del queues[address]
