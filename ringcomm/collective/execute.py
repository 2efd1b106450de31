"""The one executor: it runs any schedule over any fabric, with everything overlapped.

An :class:`Execution` is a state machine without a wait: :meth:`~Execution.advance` moves every byte
that can move now and says whether all is done. :func:`run` is the loop around it that polls,
sleeps and gives up. A simulation calls ``advance`` itself, in any order it likes.

**How sending, receiving and reducing overlap.** Every step of a schedule becomes a :class:`Flow`, whose
position moves from the start to the end of its span, as far as the flows that it depends on have come
(:meth:`Flow.limit`). So sending a span chases the fold that produces it, and no step waits for another to
finish. Between two ranks all flows are one stream each way, with one header in front.

**Memory.** Overwriting steps receive straight into the caller's buffer, and sends leave straight
from it. A fold receives into one segment per peer, taken from a :class:`SegmentPool`. A fold of one peer's
elements adds them where they have arrived, if the link shows them (:meth:`~..transport.base.Link.peek`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ..clock import POLLING, Clock, Deadline, monotonic
from ..dtypes import Array
from ..errors import MismatchError
from ..schedule.steps import DATA, SELF, Dependencies, Recv, Send, Step, exchange_lengths
from ..transport.base import Fabric, Link
from ..wire.frames import HEADER_BYTES, Header, stamp, unpack_header
from ..wire.signature import explain_difference
from .reduce import Kernel, Workspace

Counts = Dict[int, Tuple[int, int]]
"""Bytes sent and received, by peer."""
_BYTE = np.dtype(np.uint8)
_AT_ONCE_BYTES = 512 * 1024
"""Combine at most this at once in place, so that the pass over the result finds it in the cache."""


class Part(ABC):
    """One rank's part in one collective, which can be repeated: :meth:`arm` it, then :meth:`advance`."""

    moved_bytes: int  # since it was armed; grows whenever anything moves
    waits_for: Tuple[int, ...] = ()  # the peers from which it waited to receive when it last slept
    # By peer, how long it has slept in all runs until that peer's bytes arrived. If it waited for several
    # peers at once, each has an equal part of that time.
    slept_s: Dict[int, float]

    @abstractmethod
    def arm(self, sequence: int, data: Array, source: Optional[Array] = None) -> None:
        """Get ready to run: the result grows in ``data``, ``source`` is only read."""

    @abstractmethod
    def disarm(self) -> None:
        """Release the caller's arrays, so that a kept execution does not keep them alive."""

    @abstractmethod
    def advance(self) -> bool:
        """Move everything that can move without waiting; return whether the collective is complete here."""

    @abstractmethod
    def exchanged(self) -> Counts:
        """Return the bytes exchanged since this was armed; approximate while it runs."""

    @abstractmethod
    def volume(self) -> Counts:
        """Return the bytes that each run exchanges. For any thread."""

    @abstractmethod
    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        """Return the links that could move if they were (readable, writable)."""


# -- the loop -----------------------------------------------------------------------------------------


class StoodStill(TimeoutError):
    """Nothing moved within the time limit. (A program's signal handler may raise a TimeoutError as well.)"""


def run(
    execution: Part,
    fabric: Fabric,
    timeout_s: float,
    spin_s: float = 0.0,  # polling before each sleep; waking a process up costs 50 to 100 us
    may_poll: Optional[Callable[[], bool]] = None,  # whether to poll just now; None: always
    clock: Clock = monotonic,
) -> None:
    """Run a part to its end; StoodStill if nothing moved for ``timeout_s``."""
    if execution.advance():
        return
    quiet = Deadline(timeout_s, clock)
    moved = execution.moved_bytes
    watch = fabric.watch
    interval_s = 3600.0 if watch is None else watch.interval_s
    now_s = time.perf_counter()
    spin_until = POLLING.until(now_s, spin_s) if may_poll is None or may_poll() else now_s
    check_at = now_s + interval_s
    execution.waits_for = ()
    while not execution.advance():
        if execution.moved_bytes != moved:
            moved = execution.moved_bytes
            quiet.restart()
            now_s = time.perf_counter()
            spin_until = POLLING.until(now_s, spin_s) if may_poll is None or may_poll() else now_s
            if watch is not None and now_s >= check_at:
                # A transfer that never stops to wait must not keep this rank from hearing and being heard.
                check_at = now_s + interval_s
                watch.check()
        elif time.perf_counter() < spin_until:
            POLLING.give_way()
        else:
            if quiet.expired():
                raise StoodStill
            reading, writing = execution.waiting_for()
            peers = execution.waits_for = tuple({link.peer for link in reading})
            sleep_s = min(quiet.remaining_s(), interval_s)
            asleep_s = time.perf_counter()
            fabric.wait(reading, writing, sleep_s)
            for peer in peers:  # none if it waited only to send: then no peer was late
                slept_s = (time.perf_counter() - asleep_s) / len(peers)
                execution.slept_s[peer] = execution.slept_s.get(peer, 0.0) + slept_s
            if watch is not None:
                watch.check()


# -- the executor -------------------------------------------------------------------------------------


class Execution(Part):
    """A part in which every step is a flow. ``header`` goes in front of the bytes to and from every peer."""

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
        self._kernel: Any = kernel  # a schedule that folds has one
        self._pool = pool
        self._dtype = dtype
        self._item = dtype.itemsize
        self.headers = Headers(header, schedule, fabric.rank)
        self.moved_bytes = 0
        self.slept_s = {}
        self._flows: List[Flow] = []
        self._all_sends: List[Stream] = []
        self._all_receives: List[Stream] = []
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

    def advance(self) -> bool:
        while True:
            before = self.moved_bytes
            if self._sends:
                self._advance_sends()
            if self._receives:
                self._advance_receives()
            if not self._sends and not self._receives:
                return True
            # If nothing else can move, fold received bytes although no segment is full: the peers
            # may be waiting for the result.
            if self.moved_bytes == before and not self._fold_partial():
                return False

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
        """Combine bytes that the link shows; return whether to try again at once, None to receive them."""
        position, peer, item = flow.position, stream.link.peer, self._item
        most = min(flow.limit() - position, flow.segment_bytes, _AT_ONCE_BYTES)
        if most < item or flow.arrived[peer] != position:
            # Bytes that may not be combined yet must not stay in place: the peer may wait until they are
            # received. And bytes in the segment come first.
            return None
        piece = stream.link.peek(most - most % item, item)
        if not piece:
            return None if piece is None else False
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
        return reading, writing


# -- what it consists of: headers, memory, positions that move, streams -------------------------------


class Headers:
    """The headers of one call, by peer; peers of which equal lengths are exchanged share the bytes."""

    __slots__ = ("_rank", "expected", "outgoing", "packed")

    def __init__(self, header: Header, schedule: Sequence[Step], rank: int) -> None:
        self._rank = rank
        self.outgoing: Dict[int, bytearray] = {}
        self.expected: Dict[int, bytearray] = {}
        shared: Dict[bytes, bytearray] = {}
        for peer, (sends, expects) in exchange_lengths(schedule).items():
            mine = header._replace(sends=sends, expects=expects)
            for headers, content in ((self.outgoing, mine.pack()), (self.expected, mine.turned().pack())):
                headers[peer] = shared.setdefault(content, bytearray(content))
        self.packed: List[bytearray] = list(shared.values())

    def check(self, peer: int, received: memoryview) -> None:
        """Compare a peer's header with the expected one; MismatchError if the peer is in another call."""
        expected = self.expected[peer]
        if received[:HEADER_BYTES] != expected:
            mine, theirs = unpack_header(expected), unpack_header(received[:HEADER_BYTES])
            # An unexplained difference is a byte that must be zero.
            difference = explain_difference(mine, theirs) or "its header is damaged"
            raise MismatchError(difference, rank=self._rank, peer=peer)


class SegmentPool:
    """Segments, packets and working space, for one execution at a time. ``segment_bytes`` 0: the link's."""

    def __init__(self, segment_bytes: int = 0) -> None:
        # Whole elements of every type must fit: 16 bytes is the largest.
        self.segment_bytes = max(16, segment_bytes // 16 * 16) if segment_bytes else 0
        self.release()

    def release(self) -> None:
        """Free all memory."""
        self.workspace = Workspace()
        self._segments: Dict[int, Array] = {}
        self._packets: Array = np.empty(0, np.uint8)

    def packets(self, nbytes: int) -> Array:
        """Return bytes for the packets of one execution, which any other may overwrite when it has ended."""
        if nbytes > self._packets.size:
            self._packets = np.zeros(1 << max(12, (nbytes - 1).bit_length()), np.uint8)
        return self._packets[:nbytes]

    def bytes_for(self, link: Link) -> int:
        """Return the size of the segment for this link."""
        return self.segment_bytes or link.segment_bytes

    def segment(self, link: Link) -> Array:
        """Return the bytes to receive into from this link's peer."""
        segment = self._segments.get(link.peer)
        if segment is None:
            segment = self._segments[link.peer] = np.empty(self.bytes_for(link), np.uint8)
        return segment


class Segment:
    """A peer's segment as an execution sees it: bytes to receive into, elements to fold."""

    __slots__ = ("bytes", "elements")

    def __init__(self, segment: Array, dtype: np.dtype[Any]) -> None:
        self.bytes: memoryview = segment.data
        self.elements: Array = segment.view(dtype)


class Flow:
    """One step in progress: the bytes ``[start, stop)`` of a buffer, moved up to ``position``."""

    __slots__ = ("_alive", "before", "position", "start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start = self.position = start
        self.stop = stop
        self.before: Tuple[Flow, ...] = ()
        self._alive = 0

    def rewind(self) -> None:
        """Go back to the start, for another collective of the same schedule."""
        self.position = self.start
        self._alive = len(self.before)

    def limit(self) -> int:
        """Return how far this flow may go now, given the positions of the flows that it depends on."""
        limit = self.stop
        if not self._alive:
            return limit
        before = self.before
        while self._alive and before[self._alive - 1].position >= before[self._alive - 1].stop:
            self._alive -= 1
        for index in range(self._alive):
            other = before[index]
            if other.position < other.stop and other.position < limit:
                limit = other.position
        return limit


class Receipt(Flow):
    """A ``Recv`` step: ``position`` is how far it is folded (or, without a fold, received)."""

    __slots__ = ("arrived", "final", "fold", "in_place", "operands", "peers", "segment_bytes", "window")

    def __init__(self, start: int, stop: int, step: Recv) -> None:
        super().__init__(start, stop)
        self.peers = step.peers
        self.fold = step.fold
        self.final = step.final
        # For folds: bytes received from each peer so far, as positions in the span; they lie in
        # that peer's segment, which shows the span from ``window`` on.
        self.arrived: Dict[int, int] = dict.fromkeys(step.peers, start) if step.fold else {}
        self.window = start
        self.in_place = False  # whether to fold what the link shows, if it shows it
        self.segment_bytes = 0  # how much of the span the segments of its peers can show
        self.operands: List[Optional[Segment]] = []  # None stands for this rank's own

    def rewind(self) -> None:
        """Go back to the start, with nothing received."""
        start = self.position = self.window = self.start
        self._alive = len(self.before)
        for peer in self.arrived:
            self.arrived[peer] = start


class Stream:
    """All flows between this rank and one peer in one direction, in order."""

    __slots__ = ("buffers", "current", "flows", "header", "header_left", "index", "link", "segment")

    def __init__(self, link: Link, header: memoryview) -> None:
        self.link = link
        self.header = header
        self.segment: Optional[Segment] = None
        self.flows: List[Any] = []
        self.buffers: List[int] = []
        self.header_left = HEADER_BYTES  # bytes of it that have not passed yet
        self.index = -1
        self.current: Any = None  # the flow that the next bytes belong to; None: all are complete

    def rewind(self) -> None:
        """Go back to the header and the first flow, after the flows have been rewound."""
        self.header_left = HEADER_BYTES
        self.index = -1
        self.step()

    def passed_bytes(self) -> int:
        """Return the bytes passed since the rewind, the header included."""
        current, index = self.current, self.index
        done = self.flows if current is None else self.flows[:index]
        passed: int = HEADER_BYTES - self.header_left + sum(flow.stop - flow.start for flow in done)
        if current is None:
            return passed
        arrived: Dict[int, int] = getattr(current, "arrived", {})
        reached: int = arrived.get(self.link.peer, current.position)
        return passed + reached - int(current.start)

    def total_bytes(self) -> int:
        """Return the bytes that pass in all, the header included."""
        payload: int = sum(flow.stop - flow.start for flow in self.flows)
        return HEADER_BYTES + payload

    def step(self) -> None:
        """Continue with the next flow that has anything left to move."""
        flows, index = self.flows, self.index + 1
        while index < len(flows) and flows[index].position == flows[index].stop:
            index += 1
        self.index = index
        self.current = flows[index] if index < len(flows) else None


def summed(counts: Iterable[Counts]) -> Counts:
    """Return the sums by peer."""
    total: Counts = {}
    for peer, (sent, received) in (item for part in counts for item in part.items()):
        before = total.get(peer, (0, 0))
        total[peer] = (before[0] + sent, before[1] + received)
    return total
