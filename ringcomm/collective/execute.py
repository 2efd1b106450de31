"""The one executor: it runs any schedule over any fabric, with everything overlapped.

An :class:`Execution` is a state machine without a wait: :meth:`~Execution.advance` moves every byte
that can move now and says whether all is done. :func:`~.drive.run` is the loop around it that polls,
sleeps and gives up. A simulation calls ``advance`` itself, in any order it likes.

**How sending, receiving and reducing overlap.** Every step is a :class:`~.parts.Flow`, a position that
moves as far as the flows it depends on allow. Between two ranks all flows are one stream each way,
with one header in front.

**Memory.** Overwriting steps receive straight into the caller's buffer, and sends leave straight
from it. A fold receives into one segment per peer, taken from a :class:`SegmentPool`. A fold of one peer's
elements adds them where they have arrived, if the link shows them (:meth:`~..transport.base.Link.peek`).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import Array
from ..errors import BrokenInvariantError
from ..schedule.steps import DATA, SELF, Dependencies, Send, Step
from ..transport.base import Fabric, Link
from ..wire.frames import HEADER_BYTES, Header, stamp
from .parts import Counts, Flow, Headers, Part, Receipt, Segment, SegmentPool, Stream
from .reduce import Kernel

_BYTE = np.dtype(np.uint8)
_AT_ONCE_BYTES = 512 * 1024
"""Combine at most this at once in place, so that the pass over the result finds it in the cache."""


class Execution(Part):
    """A part in which every step is a flow, so that everything overlaps. ``header`` goes in front of the
    bytes to every peer, and is expected from every peer; lengths are filled in here, the sequence number by
    :meth:`arm`.
    """

    _folds_in_place = True
    """Whether elements may be combined in the link's memory."""

    def __init__(
        self,
        schedule: Sequence[Step],
        fabric: Fabric,
        header: Header,
        dtype: np.dtype[Any],
        pool: SegmentPool,
        kernel: Optional[Kernel] = None,  # for schedules that fold
    ) -> None:
        self._kernel = kernel
        self._pool = pool
        self._dtype = dtype
        self._item = dtype.itemsize
        self.headers = Headers(header, schedule, fabric.rank)
        self.moved_bytes = 0
        self.slept_s = {}
        self._flows: List[Flow] = []
        self._all_sends: List[Stream] = []
        self._all_receives: List[Stream] = []
        self._links: List[Link] = []
        self._compile(schedule, fabric)
        self._sends: List[Stream] = []
        self._receives: List[Stream] = []

    def arm(self, sequence: int, data: Array, source: Optional[Array] = None) -> None:
        stamp(self.headers.packed, sequence)
        self._data = data
        # memoryview cannot cast bfloat16 and friends; a byte view of the array always works.
        view = data.view(_BYTE).data
        self._views = (view, view if source is None else source.view(_BYTE).data)
        for flow in self._flows:
            flow.rewind()
        for stream in (*self._all_sends, *self._all_receives):
            stream.rewind()
        self._sends = self._all_sends
        self._receives = self._all_receives
        self.moved_bytes = 0

    def disarm(self) -> None:
        del self._data, self._views

    def _compile(self, schedule: Sequence[Step], fabric: Fabric) -> None:
        outward: Dict[int, Stream] = {}
        inward: Dict[int, Stream] = {}
        dependencies = Dependencies(schedule)
        for step in schedule:
            start, stop = step.start * self._item, step.stop * self._item
            if isinstance(step, Send):
                flow: Flow = Flow(start, stop)
                if step.peer not in outward:
                    outward[step.peer] = Stream(
                        fabric.link(step.peer), memoryview(self.headers.outgoing[step.peer])
                    )
                outward[step.peer].flows.append(flow)
                outward[step.peer].buffers.append(step.buffer)
            else:
                flow = Receipt(start, stop, step)
                for peer in step.peers:
                    if peer not in inward:
                        inward[peer] = Stream(fabric.link(peer), memoryview(bytearray(HEADER_BYTES)))
                    inward[peer].flows.append(flow)
                    if step.fold and inward[peer].segment is None:
                        inward[peer].segment = Segment(self._pool.segment(inward[peer].link), self._dtype)
                if step.fold:
                    flow.segment_bytes = min(self._pool.bytes_for(inward[peer].link) for peer in step.peers)
                    segments = {peer: inward[peer].segment for peer in step.peers}
                    flow.operands = [None if peer == SELF else segments[peer] for peer in step.fold]
                    # With two operands none is used as working space.
                    lone = len(step.peers) == 1 and len(step.fold) == 2
                    flow.in_place = lone and self._folds_in_place and inward[step.peers[0]].link.peeks
            flow.before = tuple(self._flows[index] for index in dependencies.of(len(self._flows), step))
            self._flows.append(flow)
        self._all_sends = list(outward.values())
        self._all_receives = list(inward.values())
        for stream in (*self._all_sends, *self._all_receives):
            stream.seal()
        self._links = list(
            {stream.link.peer: stream.link for stream in (*self._all_sends, *self._all_receives)}.values()
        )

    def advance(self) -> bool:
        while True:
            before = self.moved_bytes
            if self._sends:
                self._advance_sends()
            if self._receives:
                self._advance_receives()
            if not self._sends and not self._receives:
                return self._settled()
            # If nothing else can move, fold received bytes although no segment is full: the peers
            # may be waiting for the result.
            if self.moved_bytes == before and not self._fold_partial():
                return False

    def _settled(self) -> bool:
        """Return whether no link keeps bytes that it has taken; asking all of them sends the last ones."""
        unsettled = [link for link in self._links if not link.settled()]
        return not unsettled

    def _fold_partial(self) -> bool:
        folded = False
        # Received bytes belong to the stream's current flow: a ring of p ranks has p - 1 folds.
        for stream in self._receives:
            flow = stream.current
            if flow is None or not flow.fold or flow.position >= flow.stop:
                continue
            arrived = not flow.in_place or flow.arrived[flow.peers[0]] > flow.position
            if arrived and self._fold(flow, partial=True):
                folded = True
        return folded

    def _advance_sends(self) -> None:
        finished = False
        for stream in self._sends:
            while self._send_some(stream):
                pass
            if stream.current is None and not stream.header_left:
                finished = True
        if finished:
            self._sends = [item for item in self._sends if item.header_left or item.current is not None]

    def _send_some(self, stream: Stream) -> bool:
        """Send from the stream's current flow; return whether to try again at once."""
        flow, wanted = stream.current, stream.header_left
        views = [stream.header[HEADER_BYTES - wanted :]] if wanted else []
        if flow is not None:
            position = flow.position
            limit = min(flow.limit(), position + stream.link.burst_bytes)
            if limit > position:
                views.append(self._views[stream.buffers[stream.index]][position:limit])
                wanted += limit - position
        if not wanted:
            return False
        sent = stream.link.send(views)
        if not sent:
            return False
        self.moved_bytes += sent
        payload = sent
        if stream.header_left:
            payload = max(0, sent - stream.header_left)
            stream.header_left -= sent - payload
        if payload:
            flow.position = position + payload
            if flow.position == flow.stop:
                stream.step()
        if sent < wanted or sent >= stream.link.burst_bytes:
            return False
        flow = stream.current
        return flow is not None and flow.limit() > flow.position

    def _advance_receives(self) -> None:
        finished = False
        for stream in self._receives:
            while self._recv_some(stream):
                pass
            if stream.current is None and not stream.header_left:
                finished = True
        if finished:
            self._receives = [item for item in self._receives if item.header_left or item.current is not None]

    def _recv_some(self, stream: Stream) -> bool:
        """Receive for the stream's current flow; return whether to try again at once."""
        flow: Optional[Receipt] = stream.current
        if flow is not None and flow.position == flow.stop:
            # Another peer's bytes were the last that this fold was waiting for.
            stream.step()
            return stream.current is not None
        if flow is not None and flow.in_place:
            if stream.header_left and not self._recv_header(stream):
                return False
            again = self._fold_in_place(stream, flow)
            if again is not None:
                return again
        wanted = stream.header_left
        views = [stream.header[HEADER_BYTES - wanted :]] if wanted else []
        if flow is not None:
            room = self._room(stream, flow)
            if room is not None:
                views.append(room)
                wanted += room.nbytes
        if not wanted:
            return False
        got = stream.link.recv(views)
        if not got:
            return False
        self.moved_bytes += got
        payload = got
        if stream.header_left:
            payload = max(0, got - stream.header_left)
            stream.header_left -= got - payload
            if not stream.header_left:
                self.headers.check(stream.link.peer, stream.header)
        if payload and flow is not None:
            if flow.fold:
                flow.arrived[stream.link.peer] += payload
                self._fold(flow, partial=False)
            else:
                flow.position += payload
            if flow.position == flow.stop:
                stream.step()
        return got == wanted and stream.current is not None

    def _recv_header(self, stream: Stream) -> bool:
        """Receive a header by itself; return whether it is complete."""
        got = stream.link.recv_packet(stream.header[HEADER_BYTES - stream.header_left :])
        self.moved_bytes += got
        stream.header_left -= got
        if stream.header_left:
            return False
        self.headers.check(stream.link.peer, stream.header)
        return True

    def _fold_in_place(self, stream: Stream, flow: Receipt) -> Optional[bool]:
        """Combine bytes of the stream's peer in place; return whether to try again at once, or None if the
        next bytes must be received.
        """
        position, peer, item = flow.position, stream.link.peer, self._item
        most = min(flow.limit() - position, flow.segment_bytes, _AT_ONCE_BYTES)
        if most < item or flow.arrived[peer] != position:
            # Bytes that may not be combined yet must not stay in place: the peer may wait until they are
            # received. And bytes in the segment come first.
            return None
        piece = stream.link.peek(most - most % item, item)
        if not piece:
            return None if piece is None else False
        if self._kernel is None:
            raise BrokenInvariantError("a schedule that folds was started without a kernel")
        reached = position + piece.nbytes
        out, theirs = self._data[position // item : reached // item], np.frombuffer(piece, self._dtype)
        operands = [out if segment is None else theirs for segment in flow.operands]
        self._kernel.fold(out, operands, flow.final, self._pool.workspace)
        if not stream.link.skip(reached - position):
            return False
        self.moved_bytes += 2 * (reached - position)  # received and combined
        flow.position = flow.window = flow.arrived[peer] = reached
        if reached == flow.stop:
            stream.step()
        return stream.current is not None

    def _room(self, stream: Stream, flow: Receipt) -> Optional[memoryview]:
        """Return where bytes from this peer may go now; None if nowhere."""
        if stream.segment is not None and flow.fold:
            arrived = flow.arrived[stream.link.peer]
            end = min(flow.stop, flow.window + flow.segment_bytes)
            if end == arrived:
                return None
            return stream.segment.bytes[arrived - flow.window : end - flow.window]
        limit = flow.limit()
        return self._views[DATA][flow.position : limit] if limit > flow.position else None

    def _fold(self, flow: Receipt, partial: bool) -> bool:
        """Combine the bytes that all peers have delivered; return whether there were any."""
        end = min(flow.stop, flow.window + flow.segment_bytes)
        ready = min(flow.arrived.values())
        if ready < end and not partial:
            return False
        ready = min(ready, flow.limit())
        if ready < end:
            if not partial:
                return False
            ready -= (ready - flow.start) % self._item
        if ready <= flow.position:
            return False
        if self._kernel is None:
            raise BrokenInvariantError("a schedule that folds was started without a kernel")
        item = self._item
        out = self._data[flow.position // item : ready // item]
        low, high = (flow.position - flow.window) // item, (ready - flow.window) // item
        operands = [out if segment is None else segment.elements[low:high] for segment in flow.operands]
        self._kernel.fold(out, operands, flow.final, self._pool.workspace)
        self.moved_bytes += ready - flow.position
        flow.position = ready
        if ready == end:
            flow.window = end
        return True

    def exchanged(self) -> Counts:
        return self._by_peer(Stream.passed_bytes)

    def volume(self) -> Counts:
        return self._by_peer(Stream.total_bytes)

    def _by_peer(self, bytes_of: Callable[[Stream], int]) -> Counts:
        sent = {stream.link.peer: bytes_of(stream) for stream in self._all_sends}
        received = {stream.link.peer: bytes_of(stream) for stream in self._all_receives}
        return {peer: (sent.get(peer, 0), received.get(peer, 0)) for peer in {*sent, *received}}

    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        reading: List[Link] = []
        for stream in self._receives:
            flow = stream.current
            if stream.header_left or flow is None or self._room(stream, flow) is not None:
                reading.append(stream.link)
        writing: List[Link] = []
        for stream in self._sends:
            flow = stream.current
            if stream.header_left or flow is None or flow.limit() > flow.position:
                writing.append(stream.link)
        if not self._sends and not self._receives:
            writing = [link for link in self._links if not link.settled()]
        return reading, writing
