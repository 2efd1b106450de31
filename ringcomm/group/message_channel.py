"""Messages to and from one peer, as frames on a link, and how they are matched with receives.

The thread of a group's :class:`~.point_to_point.PointToPoint` has one :class:`Matcher` for all peers, by peer
and tag, and a :class:`Channel` to each.

A short message is sent at once (eager), as long as the peer has room for it. Any other message is announced,
and sent when the peer has posted a receive for it (rendezvous): from the sender's tensor to the receiver's,
without a buffer in between::

    SHORT   tag, type, number, length, the bytes
    LONG    tag, type, number, length      announces a message
    READY   number                         requests the bytes of an announced message
    BYTES   number, length, the bytes
    CREDIT  length                         bytes of short messages that have been received

**Flow control.** A channel reads all frames as they arrive, so a message with a posted receive is never
blocked by an earlier message without one. The bytes of a short message go straight to the tensor of a receive
that was posted before they arrive, and into a buffer otherwise. The sender limits the memory for messages
without a receive: it counts the bytes of short messages without credit, and announces every message beyond
:data:`HELD_BYTES`.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from ..clock import monotonic
from ..errors import ProtocolError
from ..transport.base import Link

SHORT_BYTES = 4 * 1024 * 1024
"""Longest message without an announcement. An announcement wakes each side once more: a copy is faster."""
HELD_BYTES = 64 * 1024 * 1024
"""Maximum bytes of short messages without credit, including the overhead per message."""
OVERHEAD_BYTES = 512  # memory for a message without a receive, besides its bytes
_HEAD = struct.Struct("<HBBiIQQ")
HEAD_BYTES = _HEAD.size
_MAGIC = 0x7C51
_SHORT, _LONG, _READY, _BYTES, _CREDIT = 1, 2, 3, 4, 5


Address = Tuple[int, int]  # the owner of the tag (0: the user, 1: ringcomm) and the tag


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
    """Receives without a message and messages without a receive, each in order."""

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
        """Return and remove the first receive for an arriving message; None: :meth:`hold` the message."""
        for receive in self._receives.get(address, ()):
            if receive.peer in (None, peer):
                self.withdraw(receive)
                return receive
        return None

    def hold(self, arrival: Arrival) -> None:
        """Keep a message for which :meth:`match` has found no receive, until one is posted."""
        self._arrivals.setdefault(arrival.address, deque()).append(arrival)

    def withdraw(self, receive: Receive) -> None:
        _remove(self._receives, receive.address, receive)

    def receives(self) -> List[Receive]:
        return [receive for queue in self._receives.values() for receive in queue]


def _remove(queues: Dict[Address, Deque[Any]], address: Address, item: Any) -> None:
    """Remove an item from its queue, and an empty queue: a program may use new tags all the time."""
    queue = queues[address]
    queue.remove(item)
    if not queue:
        del queues[address]


class Disagreement(Exception):
    """A send and its receive differ in length or type. ``peer`` is the sender."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class _Frame:
    """A frame to send: its remaining views, and the work that it finishes."""

    __slots__ = ("views", "work")

    def __init__(self, head: bytes, payload: Optional[memoryview] = None, work: Any = None) -> None:
        self.views: List[memoryview] = [memoryview(head)]
        if payload is not None and payload.nbytes:
            self.views.append(payload)
        self.work = work


class Channel:
    """The messages to and from one peer. All peers share a matcher, because a receive may accept any peer."""

    def __init__(self, link: Link, matcher: Matcher, type_name: Callable[[int], str] = hex) -> None:
        self.peer = link.peer
        self._type_name = type_name
        self.link = link
        self.moved_s = monotonic()  # the last progress in either direction
        self._matcher = matcher
        self._outgoing: Deque[_Frame] = deque()
        self._announced: Dict[int, Tuple[memoryview, Any]] = {}
        self._expected: Dict[int, Receive] = {}
        self._number = 0
        self._uncredited_bytes = 0
        self._received_bytes = 0
        self._owed_bytes = 0  # of short messages from the peer, without credit for it so far
        self._head = bytearray(HEAD_BYTES)
        self._head_have = 0
        self._sink: Optional[memoryview] = None
        self._receive: Optional[Receive] = None
        self._arrival: Optional[Arrival] = None

    # ---- operations --------------------------------------------------------------------------

    def send(self, address: Address, view: memoryview, work: Any, elements: int = 0) -> None:
        """Send a message; the view must not change until the work is done. ``elements``: code of the type."""
        self._number += 1
        taken = view.nbytes + OVERHEAD_BYTES
        if view.nbytes <= SHORT_BYTES and self._uncredited_bytes + taken <= HELD_BYTES:
            self._uncredited_bytes += taken
            head = self._pack(_SHORT, self._number, view.nbytes, address, elements)
            self._outgoing.append(_Frame(head, view, work))
        else:
            self._announced[self._number] = (view, work)
            self._outgoing.append(_Frame(self._pack(_LONG, self._number, view.nbytes, address, elements)))

    def _pack(
        self, kind: int, number: int, nbytes: int, address: Address = (0, 0), elements: int = 0
    ) -> bytes:
        return _HEAD.pack(_MAGIC, kind, address[0], address[1], elements, number, nbytes)

    def serve(self, receive: Receive, arrival: Arrival) -> None:
        """Complete or start a receive for a message that was announced; Disagreement if they differ."""
        self._check(receive, arrival)
        if arrival.number in self._expected:
            raise self._nonsense(f"announces message {arrival.number} twice")
        if arrival.content is not None:
            receive.view[:] = arrival.content
            self._give_credit(arrival.nbytes)
            self._received(receive)
        else:
            self._expected[arrival.number] = receive
            self._outgoing.append(_Frame(self._pack(_READY, arrival.number, 0)))

    def _check(self, receive: Receive, arrival: Arrival) -> None:
        if (receive.view.nbytes, receive.elements) == (arrival.nbytes, arrival.elements):
            return
        tag = receive.address[1]
        raise Disagreement(
            self.peer,
            f"recv({receive.view.nbytes} bytes{self._of(receive.elements)}, src={self.peer}, tag={tag})"
            f"{receive.work.where()}; rank {self.peer} makes another call: "
            f"send({arrival.nbytes} bytes{self._of(arrival.elements)}, tag={tag}).",
        )

    def _give_credit(self, nbytes: int) -> None:
        """Count a short message as received, and send credit when there is enough of it."""
        self._received_bytes += nbytes + OVERHEAD_BYTES
        if self._received_bytes >= HELD_BYTES // 4:
            self._outgoing.append(_Frame(self._pack(_CREDIT, 0, self._received_bytes)))
            self._owed_bytes -= self._received_bytes
            self._received_bytes = 0

    def _received(self, receive: Receive) -> None:
        receive.work.source = self.peer
        receive.work.finish()

    # ---- moving bytes ------------------------------------------------------------------------

    def advance(self) -> bool:
        """Send and receive what is possible without waiting; return whether any bytes moved."""
        moved = self.push()
        while self._receive_some():
            moved = True
            self.moved_s = monotonic()
        # Received frames may have queued replies.
        return self.push() or moved

    def push(self) -> bool:
        """Send as much as possible without waiting; return whether any bytes moved. Raises LinkClosed."""
        moved = False
        while self._outgoing:
            frame = self._outgoing[0]
            sent = self.link.send(frame.views)
            if not sent:
                break
            moved = True
            self.moved_s = monotonic()
            while frame.views and sent >= frame.views[0].nbytes:
                sent -= frame.views.pop(0).nbytes
            if frame.views:
                frame.views[0] = frame.views[0][sent:]
                continue
            self._outgoing.popleft()
            if frame.work is not None:
                frame.work.finish()
        return moved

    def _receive_some(self) -> bool:
        if self._sink is None:
            got = self.link.recv([memoryview(self._head)[self._head_have :]])
            self._head_have += got
            if self._head_have == HEAD_BYTES:
                self._head_have = 0
                self._take_head()
            return got > 0
        if self._sink.nbytes:
            got = self.link.recv([self._sink])
            self._sink = self._sink[got:]
            if self._sink.nbytes:
                return got > 0
        self._take_body()
        return True

    def _take_head(self) -> None:
        magic, kind, owner, tag, elements, number, nbytes = _HEAD.unpack(self._head)
        valid = magic == _MAGIC and _SHORT <= kind <= _CREDIT
        if not valid or kind == _SHORT and nbytes > SHORT_BYTES:
            raise ProtocolError(f"what rank {self.peer} sent is not the start of a message")
        if kind in (_SHORT, _LONG):
            arrival = Arrival(self.peer, (owner, tag), number, elements, nbytes)
            receive = self._matcher.match(self.peer, arrival.address)
            if receive is not None:
                self._check(receive, arrival)
            if kind == _SHORT:
                self._begin_short(arrival, receive)
            elif receive is None:
                self._matcher.hold(arrival)
            else:
                self.serve(receive, arrival)
        elif kind == _BYTES:
            receive = self._expected.pop(number, None)
            if receive is None or receive.view.nbytes != nbytes:
                raise self._nonsense(f"sends {nbytes} bytes of message {number}, which nothing waits for")
            self._receive = receive
            self._sink = receive.view
        elif kind == _READY:
            if number not in self._announced:
                raise self._nonsense(f"is ready for message {number}, which was not announced to it")
            view, work = self._announced.pop(number)
            self._outgoing.append(_Frame(self._pack(_BYTES, number, view.nbytes), view, work))
        elif nbytes > self._uncredited_bytes:
            raise self._nonsense(f"gives credit for {nbytes} bytes, and has {self._uncredited_bytes}")
        else:
            self._uncredited_bytes -= nbytes

    def _nonsense(self, text: str) -> ProtocolError:
        return ProtocolError(f"rank {self.peer} {text}: it runs another version of ringcomm, or is broken")

    def _begin_short(self, arrival: Arrival, receive: Optional[Receive]) -> None:
        self._owed_bytes += arrival.nbytes + OVERHEAD_BYTES
        if self._owed_bytes > HELD_BYTES:
            raise self._nonsense(f"sends short messages beyond the limit of {HELD_BYTES} bytes")
        if receive is not None:
            self._receive = receive
            self._sink = receive.view
            self._give_credit(arrival.nbytes)
        else:
            content = memoryview(bytearray(arrival.nbytes))
            self._arrival = arrival._replace(content=content)
            self._sink = content

    def _take_body(self) -> None:
        receive, arrival = self._receive, self._arrival
        self._sink = self._receive = self._arrival = None
        if receive is not None:
            self._received(receive)
        elif arrival is not None:
            # A receive may have been posted while the message was arriving.
            late = self._matcher.match(self.peer, arrival.address)
            if late is None:
                self._matcher.hold(arrival)
            else:
                self.serve(late, arrival)

    def writing(self) -> bool:
        return bool(self._outgoing)

    def is_at_work(self) -> bool:
        """Return whether bytes have to be sent, or are being received."""
        return bool(self._outgoing or self._expected or self._receive)

    def in_transit(self, work: Any) -> bool:
        """Return whether this work's send and receive are matched, and its bytes are being moved."""
        if self._receive is not None and self._receive.work is work:
            return True
        coming = any(receive.work is work for receive in self._expected.values())
        return coming or any(frame.work is work for frame in self._outgoing)

    def unfinished(self) -> List[Any]:
        """Return the works that are not finished and need this peer."""
        works = [frame.work for frame in self._outgoing if frame.work is not None]
        works += [work for _, work in self._announced.values()]
        works += [receive.work for receive in self._expected.values()]
        return works + ([self._receive.work] if self._receive is not None else [])

    def _of(self, elements: int) -> str:
        return f" of {self._type_name(elements)}" if elements else ""
