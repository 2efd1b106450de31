"""Messages to and from one peer, as frames on a link.

A short message is sent right away. A long one is announced, and sent when the peer has a receive
for it: straight from the sender's tensor to the receiver's, so it is nowhere stored in between::

    SHORT  tag, number, length, the bytes
    LONG   tag, number, length            "I have so many bytes for you"
    READY  number                         "send them"
    WRONG  number, length                 "my receive is for another number of bytes"
    BYTES  number, length, the bytes
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

from ..errors import MismatchError, ProtocolError
from ..transport.base import Link
from .message_matching import Address, Arrival, Matcher, Receive

SHORT_BYTES = 32 * 1024
HELD_BYTES = 64 * 1024 * 1024
"""No more is read from a peer while so much of it has found no receive."""
_HEAD = struct.Struct("<HBBiQQ")
HEAD_BYTES = _HEAD.size
_MAGIC = 0x7C50
_SHORT, _LONG, _READY, _WRONG, _BYTES = 1, 2, 3, 4, 5


class _Frame:
    """Something to be sent: the views that are left of it, and the work that is done then."""

    __slots__ = ("views", "work")

    def __init__(self, head: bytes, payload: Optional[memoryview], work: Any) -> None:
        self.views: List[memoryview] = [memoryview(head)]
        if payload is not None and payload.nbytes:
            self.views.append(payload)
        self.work = work


class Channel:
    """One peer.

    Args:
        link: the stream to it.
        matcher: shared by all peers, since a receive may take from anybody.
    """

    def __init__(self, link: Link, matcher: Matcher) -> None:
        self.peer = link.peer
        self.link = link
        self._matcher = matcher
        self._outgoing: Deque[_Frame] = deque()
        self._announced: Dict[int, Tuple[memoryview, Any]] = {}
        self._expected: Dict[int, Receive] = {}
        self._number = 0
        self._head = bytearray(HEAD_BYTES)
        self._head_have = 0
        self._sink: Optional[memoryview] = None
        self._receive: Optional[Receive] = None
        self._arrival: Optional[Arrival] = None

    # ---- what the group asks for -------------------------------------------------------------

    def send(self, address: Address, view: memoryview, work: Any) -> None:
        """Send a message; the view must stay as it is until the work is finished."""
        self._number += 1
        if view.nbytes <= SHORT_BYTES:
            self._outgoing.append(_Frame(self._pack(_SHORT, address, view.nbytes), view, work))
        else:
            self._announced[self._number] = (view, work)
            self._outgoing.append(_Frame(self._pack(_LONG, address, view.nbytes), None, None))

    def _pack(self, kind: int, address: Address, nbytes: int, number: int = -1) -> bytes:
        number = self._number if number < 0 else number
        return _HEAD.pack(_MAGIC, kind, address[0], address[1], number, nbytes)

    def serve(self, receive: Receive, arrival: Arrival) -> None:
        """A receive was posted for a message that had come, or been announced, before."""
        if receive.view.nbytes != arrival.nbytes:
            self._refuse(receive, arrival.nbytes, None if arrival.content is not None else arrival.number)
        elif arrival.content is not None:
            receive.view[:] = arrival.content
            self._received(receive)
        else:
            self._ask_for(receive, arrival.number)

    def _ask_for(self, receive: Receive, number: int) -> None:
        self._expected[number] = receive
        self._outgoing.append(_Frame(self._pack(_READY, receive.address, 0, number), None, None))

    def _refuse(self, receive: Receive, nbytes: int, number: Optional[int]) -> None:
        """Sizes differ. Both sides are told, and the next message is none the worse for it."""
        if number is not None:
            head = self._pack(_WRONG, receive.address, receive.view.nbytes, number)
            self._outgoing.append(_Frame(head, None, None))
        receive.work.finish(
            MismatchError(
                f"rank {self.peer} sent {nbytes} bytes with tag {receive.address[1]}, but the receive here "
                f"is for {receive.view.nbytes}.",
                peer=self.peer,
            )
        )

    def _received(self, receive: Receive) -> None:
        receive.work.source = self.peer
        receive.work.finish()

    # ---- moving bytes ------------------------------------------------------------------------

    def advance(self) -> bool:
        """Move what can be moved without waiting; whether anything was.

        Raises:
            LinkClosed: the peer is gone.
            ProtocolError: it sent nonsense.
        """
        moved = self._send_some()
        while self._receive_some():
            moved = True
        # What has just arrived may have made something to send.
        return self._send_some() or moved

    def _send_some(self) -> bool:
        moved = False
        while self._outgoing:
            frame = self._outgoing[0]
            sent = self.link.send(frame.views)
            if not sent:
                break
            moved = True
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
            if self._matcher.held_bytes(self.peer) > HELD_BYTES:
                return False
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
        magic, kind, owner, tag, number, nbytes = _HEAD.unpack(self._head)
        address = (owner, tag)
        if magic != _MAGIC or not _SHORT <= kind <= _BYTES or kind == _SHORT and nbytes > SHORT_BYTES:
            raise ProtocolError(f"what rank {self.peer} sent is not the start of a message")
        if kind == _SHORT:
            self._begin_short(Arrival(self.peer, address, number, nbytes, None))
        elif kind == _LONG:
            receive = self._matcher.match(self.peer, address)
            arrival = Arrival(self.peer, address, number, nbytes, None)
            if receive is None:
                self._matcher.hold(arrival)
            else:
                self.serve(receive, arrival)
        elif kind == _BYTES:
            self._receive = self._expected.pop(number)
            self._sink = self._receive.view
        else:
            view, work = self._announced.pop(number)
            if kind == _READY:
                head = self._pack(_BYTES, address, view.nbytes, number)
                self._outgoing.append(_Frame(head, view, work))
            else:
                work.finish(
                    MismatchError(
                        f"this rank sent {view.nbytes} bytes with tag {tag}, but rank {self.peer}'s receive "
                        f"is for {nbytes}.",
                        peer=self.peer,
                    )
                )

    def _begin_short(self, arrival: Arrival) -> None:
        receive = self._matcher.match(self.peer, arrival.address)
        if receive is not None and receive.view.nbytes == arrival.nbytes:
            self._receive, self._sink = receive, receive.view
            return
        content = memoryview(bytearray(arrival.nbytes))
        self._sink = content
        if receive is None:
            self._arrival = arrival._replace(content=content)
        else:
            self._refuse(receive, arrival.nbytes, None)  # and what comes is read and forgotten

    def _take_body(self) -> None:
        receive, arrival = self._receive, self._arrival
        self._sink = self._receive = self._arrival = None
        if receive is not None:
            self._received(receive)
        elif arrival is not None:
            # A receive may have been posted while the message was coming.
            late = self._matcher.match(self.peer, arrival.address)
            if late is None:
                self._matcher.hold(arrival)
            else:
                self.serve(late, arrival)

    def reading(self) -> bool:
        """Whether bytes that arrive could be taken."""
        return self._sink is not None or self._matcher.held_bytes(self.peer) <= HELD_BYTES

    def writing(self) -> bool:
        """Whether something is to be sent as soon as there is room."""
        return bool(self._outgoing)

    def unfinished(self) -> List[Any]:
        """The works that still need this peer."""
        works = [frame.work for frame in self._outgoing if frame.work is not None]
        works += [work for _, work in self._announced.values()]
        works += [receive.work for receive in self._expected.values()]
        return works + ([self._receive.work] if self._receive is not None else [])
