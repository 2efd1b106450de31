"""Matches messages and receives by peer and tag. Pure: no socket, no thread, no tensor.

The thread of a group's :class:`~.point_to_point.PointToPoint` has one :class:`Matcher` for all peers, which
is used in no other thread. A short message arrives with its bytes (eager); a long one is announced, and its
bytes are requested when there is a receive for it (rendezvous; see :mod:`.message_channel`). Length and type
are not compared here: the channel does that.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Tuple

Address = Tuple[int, int]
"""The owner of the tag (0: the user, 1: ringcomm) and the tag."""


class Arrival(NamedTuple):
    """A message that has been received, or announced."""

    peer: int
    address: Address
    number: int  # the sender's, by which the bytes of an announced message are requested
    elements: int  # code of the elements' type
    nbytes: int
    content: Optional[memoryview] = None  # None if the sender sends it when a receive is ready


class Receive:
    """A receive that has been posted. ``peer`` None: any; ``elements``: code of the elements' type."""

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
    """Receives without a message and messages without a receive, each in order.

    Messages of one sender with one tag are received in the order in which they were sent.
    """

    def __init__(self) -> None:
        self._receives: Dict[Address, Deque[Receive]] = {}
        self._arrivals: Dict[Address, Deque[Arrival]] = {}

    def post(self, receive: Receive) -> Optional[Arrival]:
        """Post a receive; return and remove the first message for it, or None: then the receive is kept."""
        arrivals = self._arrivals.get(receive.address)
        for arrival in arrivals or ():
            if receive.peer in (None, arrival.peer):
                _remove(self._arrivals, receive.address, arrival)
                return arrival
        self._receives.setdefault(receive.address, deque()).append(receive)
        return None

    def match(self, peer: int, address: Address) -> Optional[Receive]:
        """Return and remove the first receive for a message that begins to arrive; None if there is none: the
        caller then keeps the message by :meth:`hold`.
        """
        for receive in self._receives.get(address, ()):
            if receive.peer in (None, peer):
                self.withdraw(receive)
                return receive
        return None

    def hold(self, arrival: Arrival) -> None:
        """Keep a message for which :meth:`match` has found no receive, until one is posted."""
        self._arrivals.setdefault(arrival.address, deque()).append(arrival)

    def withdraw(self, receive: Receive) -> None:
        """Remove a receive that is kept: it has a message now, or its time is over."""
        _remove(self._receives, receive.address, receive)

    def receives(self) -> List[Receive]:
        """Return the receives without a message."""
        return [receive for queue in self._receives.values() for receive in queue]


def _remove(queues: Dict[Address, Deque[Any]], address: Address, item: Any) -> None:
    """Remove an item from its queue, and an empty queue: a program may use new tags all the time."""
    queue = queues[address]
    queue.remove(item)
    if not queue:
        del queues[address]
