"""The one executor: it runs any schedule over any fabric, with everything overlapped.

An :class:`Execution` is a state machine without a wait: :meth:`~Execution.advance` moves every byte
that can move now and says whether all is done. :func:`run` is the loop around it that polls, sleeps
and gives up. A simulation calls ``advance`` itself, in any order it likes.

**How sending, receiving and reducing overlap.** Every step is a :class:`_Flow`: a position that
moves from the start to the end of its span. A flow may move as far as the flows it depends on allow
(:meth:`_Flow.limit`), so sending a span chases the fold that produces it and no step waits for
another to finish. Between two ranks all flows are one stream each way, with one header in front.

**Memory.** Overwriting steps receive straight into the caller's buffer, and sends leave straight
from it. A fold receives into one segment per peer, taken from a :class:`SegmentPool`.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ..clock import Clock, Deadline, monotonic
from ..errors import BrokenInvariantError, MismatchError
from ..schedule.steps import DATA, SELF, Recv, Send, Step
from ..transport.base import Fabric, Link
from ..wire.frames import HEADER_BYTES, Header, explain_difference, unpack_header
from .reduce import Kernel

Array = "np.ndarray[Any, Any]"


class SegmentPool:
    """Receiving segments, one per peer, kept from one collective to the next.

    Args:
        segment_bytes: size of each.
    """

    def __init__(self, segment_bytes: int) -> None:
        # Whole elements of every type must fit: 16 bytes is the largest.
        self.segment_bytes = max(16, segment_bytes // 16 * 16)
        self._segments: Dict[int, np.ndarray[Any, Any]] = {}

    def segment(self, peer: int) -> np.ndarray[Any, Any]:
        """The bytes to receive into from this peer."""
        segment = self._segments.get(peer)
        if segment is None:
            segment = self._segments[peer] = np.empty(self.segment_bytes, np.uint8)
        return segment


class _Flow:
    """One step on its way: the bytes ``[start, stop)`` of a buffer, moved up to ``position``."""

    __slots__ = ("before", "position", "start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start = self.position = start
        self.stop = stop
        self.before: List[_Flow] = []

    def limit(self) -> int:
        """How far this flow may go now, given how far the flows that it depends on have come."""
        limit = self.stop
        before = self.before
        while before and before[-1].position >= before[-1].stop:
            before.pop()
        for other in before:
            if other.position < other.stop and other.position < limit:
                limit = other.position
        return limit


class _Receipt(_Flow):
    """A ``Recv`` step: ``position`` is how far it is folded (or, without a fold, received)."""

    __slots__ = ("arrived", "fold", "final", "peers", "segments", "window")

    def __init__(self, start: int, stop: int, step: Recv) -> None:
        super().__init__(start, stop)
        self.peers = step.peers
        self.fold = step.fold
        self.final = step.final
        # For folds: bytes received from each peer so far, as positions in the span; they lie in
        # that peer's segment, which shows the span from ``window`` on.
        self.arrived: Dict[int, int] = dict.fromkeys(step.peers, start) if step.fold else {}
        self.window = start


class _Stream:
    """All flows between this rank and one peer in one direction, in order."""

    __slots__ = ("flows", "header", "header_left", "index", "link")

    def __init__(self, link: Link, header: memoryview) -> None:
        self.link = link
        self.header = header
        self.header_left = HEADER_BYTES
        self.flows: List[Any] = []
        self.index = 0

    def done(self) -> bool:
        return not self.header_left and self.index == len(self.flows)


def _overlap(a: Tuple[int, int, int], b: Tuple[int, int, int]) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


class Execution:
    """One rank's part in one collective.

    Args:
        schedule: this rank's steps.
        fabric: where the peers are.
        header: goes in front of the bytes to every peer, and is expected from every peer.
        data: contiguous one-dimensional array in which the result grows.
        source: contiguous one-dimensional array that is only read, for schedules that have one.
        kernel: combines contributions, for schedules that fold.
        pool: where segments come from.
    """

    def __init__(
        self,
        schedule: Sequence[Step],
        fabric: Fabric,
        header: Header,
        data: np.ndarray[Any, Any],
        pool: SegmentPool,
        kernel: Optional[Kernel] = None,
        source: Optional[np.ndarray[Any, Any]] = None,
    ) -> None:
        self._rank = fabric.rank
        self._header = header
        self._kernel = kernel
        self._pool = pool
        self._data = data
        self._item = data.itemsize
        # memoryview cannot cast bfloat16 and friends; a byte view of the array always works.
        self._views = [data.view(np.uint8).data]
        self._views.append(self._views[0] if source is None else source.view(np.uint8).data)
        self._sends: List[_Stream] = []
        self._receives: List[_Stream] = []
        self.moved_bytes = 0
        self._compile(schedule, fabric, memoryview(header.pack()))

    def _compile(self, schedule: Sequence[Step], fabric: Fabric, packed: memoryview) -> None:
        outward: Dict[int, _Stream] = {}
        inward: Dict[int, _Stream] = {}
        spans: List[Tuple[int, int, int]] = []
        flows: List[_Flow] = []
        for step in schedule:
            start, stop = step.start * self._item, step.stop * self._item
            if isinstance(step, Send):
                flow: _Flow = _Flow(start, stop)
                span = (step.buffer, start, stop)
                if step.peer not in outward:
                    outward[step.peer] = _Stream(fabric.link(step.peer), packed)
                outward[step.peer].flows.append((flow, step.buffer))
            else:
                flow = _Receipt(start, stop, step)
                span = (DATA, start, stop)
                for peer in step.peers:
                    if peer not in inward:
                        inward[peer] = _Stream(fabric.link(peer), memoryview(bytearray(HEADER_BYTES)))
                    inward[peer].flows.append(flow)
            if start < stop:
                # Two sends of one span may go at once: neither writes.
                flow.before = [
                    earlier
                    for earlier, other in zip(flows, spans)
                    if _overlap(span, other)
                    and (isinstance(flow, _Receipt) or isinstance(earlier, _Receipt))
                ]
            flows.append(flow)
            spans.append(span)
        self._sends = list(outward.values())
        self._receives = list(inward.values())

    def advance(self) -> bool:
        """Move everything that can move without waiting.

        Returns:
            whether the collective is complete on this rank.

        Raises:
            LinkClosed: a peer is gone.
            MismatchError: a peer is in another collective.
        """
        while True:
            before = self.moved_bytes
            if self._sends:
                self._advance_sends()
            if self._receives:
                self._advance_receives(partial=False)
            if not self._sends and not self._receives:
                return True
            if self.moved_bytes == before:
                # Nothing else can move: fold what has arrived although the segment is not full,
                # because the peers may be waiting for what comes of it.
                self._advance_receives(partial=True)
                if self.moved_bytes == before:
                    return False

    def _advance_sends(self) -> None:
        finished = False
        for stream in self._sends:
            while stream.index < len(stream.flows) or stream.header_left:
                if not self._send_some(stream):
                    break
            finished = finished or stream.done()
        if finished:
            self._sends = [stream for stream in self._sends if not stream.done()]

    def _send_some(self, stream: _Stream) -> bool:
        """Send from the stream's current flow; whether it is worth trying again at once."""
        views: List[memoryview] = []
        if stream.header_left:
            views.append(stream.header[HEADER_BYTES - stream.header_left :])
        flow: Optional[_Flow] = None
        limit = 0
        if stream.index < len(stream.flows):
            flow, buffer = stream.flows[stream.index]
            limit = flow.limit()
            if limit > flow.position:
                views.append(self._views[buffer][flow.position : limit])
            elif not stream.header_left:
                return self._skip_empty(stream, flow)
        wanted = sum(view.nbytes for view in views)
        sent = stream.link.send(views)
        self.moved_bytes += sent
        if stream.header_left:
            used = min(sent, stream.header_left)
            stream.header_left -= used
            payload = sent - used
        else:
            payload = sent
        if flow is not None:
            flow.position += payload
            if flow.position == flow.stop and not stream.header_left:
                stream.index += 1
        return sent == wanted

    @staticmethod
    def _skip_empty(stream: _Stream, flow: _Flow) -> bool:
        """Step over a flow that has nothing (left) to move."""
        if flow.position < flow.stop:
            return False
        stream.index += 1
        return True

    def _advance_receives(self, partial: bool) -> None:
        finished = False
        for stream in self._receives:
            while stream.index < len(stream.flows) or stream.header_left:
                if not self._recv_some(stream, partial):
                    break
            finished = finished or stream.done()
        if finished:
            self._receives = [stream for stream in self._receives if not stream.done()]

    def _recv_some(self, stream: _Stream, partial: bool) -> bool:
        flow: Optional[_Receipt] = stream.flows[stream.index] if stream.index < len(stream.flows) else None
        if flow is not None and not stream.header_left and flow.position == flow.stop:
            return self._skip_empty(stream, flow)
        if flow is not None and flow.fold:
            return self._recv_folding(stream, flow, partial)
        views = [stream.header[HEADER_BYTES - stream.header_left :]] if stream.header_left else []
        if flow is not None:
            limit = flow.limit()
            if limit > flow.position:
                views.append(self._views[DATA][flow.position : limit])
        payload, again = self._recv_into(stream, views)
        if flow is not None:
            flow.position += payload
            if flow.position == flow.stop and not stream.header_left:
                stream.index += 1
        return again

    def _recv_folding(self, stream: _Stream, flow: _Receipt, partial: bool) -> bool:
        peer = stream.link.peer
        arrived = flow.arrived[peer]
        if arrived == flow.stop and not stream.header_left and flow.start < flow.stop:
            # This peer has delivered all of it; the next flow's bytes would need the same segment.
            return self._fold(flow, partial) and flow.position == flow.stop
        end = min(flow.stop, flow.window + self._pool.segment_bytes)
        views = [stream.header[HEADER_BYTES - stream.header_left :]] if stream.header_left else []
        if end > arrived:
            segment = self._pool.segment(peer)
            views.append(segment.data[arrived - flow.window : end - flow.window])
        payload, again = self._recv_into(stream, views)
        flow.arrived[peer] = arrived + payload
        folded = self._fold(flow, partial)
        if flow.position == flow.stop and not stream.header_left:
            stream.index += 1
            return True
        return again or folded

    def _recv_into(self, stream: _Stream, views: List[memoryview]) -> Tuple[int, bool]:
        """Receive into the views; (payload bytes, whether all of it came)."""
        if not views:
            return 0, False
        got = stream.link.recv(views)
        self.moved_bytes += got
        wanted = sum(view.nbytes for view in views)
        if not stream.header_left:
            return got, got == wanted
        used = min(got, stream.header_left)
        stream.header_left -= used
        if not stream.header_left:
            self._check_header(stream)
        return got - used, got == wanted

    def _check_header(self, stream: _Stream) -> None:
        theirs = unpack_header(bytes(stream.header))
        mine = unpack_header(self._header.pack())
        if mine != theirs:
            raise MismatchError(explain_difference(mine, theirs), rank=self._rank, peer=stream.link.peer)

    def _fold(self, flow: _Receipt, partial: bool) -> bool:
        """Combine what all peers have delivered; whether anything was combined."""
        end = min(flow.stop, flow.window + self._pool.segment_bytes)
        ready = min(min(flow.arrived.values()), flow.limit())
        if ready < end:
            if not partial:
                return False
            ready -= (ready - flow.start) % self._item
        if ready <= flow.position:
            return False
        if self._kernel is None:
            raise BrokenInvariantError("a schedule that folds was started without a kernel")
        out = self._data[flow.position // self._item : ready // self._item]
        low, high = flow.position - flow.window, ready - flow.window
        operands = [
            out if peer == SELF else self._pool.segment(peer)[low:high].view(self._data.dtype)
            for peer in flow.fold
        ]
        self._kernel.fold(out, operands, flow.final)
        self.moved_bytes += ready - flow.position
        flow.position = ready
        if ready == end:
            flow.window = end
        return True

    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        """The links that could move if they were (readable, writable)."""
        reading: List[Link] = []
        for stream in self._receives:
            flow = stream.flows[stream.index] if stream.index < len(stream.flows) else None
            if stream.header_left or flow is None or self._has_room(stream, flow):
                reading.append(stream.link)
        writing: List[Link] = []
        for stream in self._sends:
            flow = stream.flows[stream.index][0] if stream.index < len(stream.flows) else None
            if stream.header_left or flow is None or flow.limit() > flow.position:
                writing.append(stream.link)
        return reading, writing

    def _has_room(self, stream: _Stream, flow: _Receipt) -> bool:
        if not flow.fold:
            return flow.limit() > flow.position
        end = min(flow.stop, flow.window + self._pool.segment_bytes)
        return flow.arrived[stream.link.peer] < end


def run(
    execution: Execution,
    fabric: Fabric,
    timeout_s: float,
    spin_s: float = 0.0,
    clock: Clock = monotonic,
) -> None:
    """Run an execution to its end: poll for a while, then sleep until something can move.

    Args:
        timeout_s: how long nothing at all may move.
        spin_s: how long to poll before each sleep. Waking a process up costs 50 to 100 us.

    Raises:
        LinkClosed, MismatchError: as from :meth:`Execution.advance`.
        TimeoutError: nothing moved for ``timeout_s``.
        RingcommError: the watch announced the end of the job.
    """
    if execution.advance():
        return
    quiet = Deadline(timeout_s, clock)
    moved = execution.moved_bytes
    spin_until = time.perf_counter() + spin_s
    while not execution.advance():
        if execution.moved_bytes != moved:
            moved = execution.moved_bytes
            quiet.restart()
            spin_until = time.perf_counter() + spin_s
        elif time.perf_counter() >= spin_until:
            if quiet.expired():
                raise TimeoutError
            reading, writing = execution.waiting_for()
            fabric.wait(reading, writing, quiet.remaining_s())
            if fabric.watch is not None:
                fabric.watch.check()
