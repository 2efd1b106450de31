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
from ..wire.frames import HEADER_BYTES, Header, explain_difference, stamp, unpack_header
from .reduce import Kernel


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

    __slots__ = ("_alive", "before", "position", "start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start = self.position = start
        self.stop = stop
        self.before: Tuple[_Flow, ...] = ()
        self._alive = 0

    def rewind(self) -> None:
        """Go back to the start, for another collective of the same schedule."""
        self.position = self.start
        self._alive = len(self.before)

    def limit(self) -> int:
        """How far this flow may go now, given how far the flows that it depends on have come."""
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


class _Receipt(_Flow):
    """A ``Recv`` step: ``position`` is how far it is folded (or, without a fold, received)."""

    __slots__ = ("arrived", "final", "fold", "peers", "window")

    def __init__(self, start: int, stop: int, step: Recv) -> None:
        super().__init__(start, stop)
        self.peers = step.peers
        self.fold = step.fold
        self.final = step.final
        # For folds: bytes received from each peer so far, as positions in the span; they lie in
        # that peer's segment, which shows the span from ``window`` on.
        self.arrived: Dict[int, int] = dict.fromkeys(step.peers, start) if step.fold else {}
        self.window = start

    def rewind(self) -> None:
        super().rewind()
        for peer in self.arrived:
            self.arrived[peer] = self.start
        self.window = self.start


class _Stream:
    """All flows between this rank and one peer in one direction, in order."""

    __slots__ = ("buffers", "flows", "header", "header_left", "index", "link")

    def __init__(self, link: Link, header: memoryview) -> None:
        self.link = link
        self.header = header
        self.flows: List[Any] = []
        self.buffers: List[int] = []
        self.header_left = HEADER_BYTES
        self.index = 0

    def rewind(self) -> None:
        self.header_left = HEADER_BYTES
        self.index = 0

    def done(self) -> bool:
        return not self.header_left and self.index == len(self.flows)


def _overlap(a: Tuple[int, int, int], b: Tuple[int, int, int]) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


class Execution:
    """One rank's part in one collective, again and again: :meth:`arm` it, then :meth:`advance`.

    Args:
        schedule: this rank's steps.
        fabric: where the peers are.
        header: goes in front of the bytes to every peer, and is expected from every peer; the
            sequence number is filled in by :meth:`arm`.
        item_bytes: size of an element.
        pool: where segments come from.
        kernel: combines contributions, for schedules that fold.
    """

    def __init__(
        self,
        schedule: Sequence[Step],
        fabric: Fabric,
        header: Header,
        item_bytes: int,
        pool: SegmentPool,
        kernel: Optional[Kernel] = None,
    ) -> None:
        self._rank = fabric.rank
        self._kernel = kernel
        self._pool = pool
        self._item = item_bytes
        self._packed = bytearray(header.pack())
        self.moved_bytes = 0
        self._flows: List[_Flow] = []
        self._all_sends: List[_Stream] = []
        self._all_receives: List[_Stream] = []
        self._links: List[Link] = []
        self._folds: List[_Receipt] = []
        self._compile(schedule, fabric)
        self._sends: List[_Stream] = []
        self._receives: List[_Stream] = []

    def arm(
        self, sequence: int, data: np.ndarray[Any, Any], source: Optional[np.ndarray[Any, Any]] = None
    ) -> None:
        """Get ready to run with these arrays.

        Args:
            sequence: number of the call, for the header.
            data: contiguous one-dimensional array in which the result grows.
            source: contiguous one-dimensional array that is only read, for schedules that have one.
        """
        stamp(self._packed, sequence)
        self._data = data
        # memoryview cannot cast bfloat16 and friends; a byte view of the array always works.
        view = data.view(np.uint8).data
        self._views = (view, view if source is None else source.view(np.uint8).data)
        for flow in self._flows:
            flow.rewind()
        for stream in self._all_sends:
            stream.rewind()
        for stream in self._all_receives:
            stream.rewind()
        self._sends = self._all_sends
        self._receives = self._all_receives
        self.moved_bytes = 0

    def disarm(self) -> None:
        """Let go of the caller's arrays, so that a kept execution does not keep them alive."""
        del self._data, self._views

    def _compile(self, schedule: Sequence[Step], fabric: Fabric) -> None:
        outward: Dict[int, _Stream] = {}
        inward: Dict[int, _Stream] = {}
        spans: List[Tuple[int, int, int]] = []
        for step in schedule:
            start, stop = step.start * self._item, step.stop * self._item
            if isinstance(step, Send):
                flow: _Flow = _Flow(start, stop)
                span = (step.buffer, start, stop)
                if step.peer not in outward:
                    outward[step.peer] = _Stream(fabric.link(step.peer), memoryview(self._packed))
                outward[step.peer].flows.append(flow)
                outward[step.peer].buffers.append(step.buffer)
            else:
                flow = _Receipt(start, stop, step)
                span = (DATA, start, stop)
                if step.fold:
                    self._folds.append(flow)
                for peer in step.peers:
                    if peer not in inward:
                        inward[peer] = _Stream(fabric.link(peer), memoryview(bytearray(HEADER_BYTES)))
                    inward[peer].flows.append(flow)
            if start < stop:
                # Two sends of one span may go at once: neither writes.
                flow.before = tuple(
                    earlier
                    for earlier, other in zip(self._flows, spans)
                    if _overlap(span, other) and (isinstance(flow, _Receipt) or isinstance(earlier, _Receipt))
                )
            self._flows.append(flow)
            spans.append(span)
        self._all_sends = list(outward.values())
        self._all_receives = list(inward.values())
        self._links = list(
            {stream.link.peer: stream.link for stream in (*self._all_sends, *self._all_receives)}.values()
        )

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
                self._advance_receives()
            if not self._sends and not self._receives:
                unsettled = [link for link in self._links if not link.settled()]
                return not unsettled
            # If nothing else can move, fold what has arrived although no segment is full: the peers
            # may be waiting for what comes of it.
            if self.moved_bytes == before and not self._fold_partial():
                return False

    def _fold_partial(self) -> bool:
        folded = False
        for flow in self._folds:
            if flow.position < flow.stop and self._fold(flow, partial=True):
                folded = True
        return folded

    def _advance_sends(self) -> None:
        finished = False
        for stream in self._sends:
            while self._send_some(stream):
                pass
            finished = finished or stream.done()
        if finished:
            self._sends = [stream for stream in self._sends if not stream.done()]

    def _send_some(self, stream: _Stream) -> bool:
        """Send from the stream's current flow; whether it is worth trying again at once."""
        views: List[memoryview] = []
        wanted = 0
        if stream.header_left:
            views.append(stream.header[HEADER_BYTES - stream.header_left :])
            wanted = stream.header_left
        flow: Optional[_Flow] = None
        if stream.index < len(stream.flows):
            flow = stream.flows[stream.index]
            limit = flow.limit()
            if limit > flow.position:
                views.append(self._views[stream.buffers[stream.index]][flow.position : limit])
                wanted += limit - flow.position
        if not wanted:
            return self._step_over(stream, flow)
        sent = stream.link.send(views)
        if not sent:
            return False
        self.moved_bytes += sent
        used = min(sent, stream.header_left)
        stream.header_left -= used
        if flow is not None:
            flow.position += sent - used
        return sent == wanted

    @staticmethod
    def _step_over(stream: _Stream, flow: Optional[_Flow]) -> bool:
        """Go on to the stream's next flow, if this one is complete; whether it was."""
        if flow is None or flow.position < flow.stop:
            return False
        stream.index += 1
        return True

    def _advance_receives(self) -> None:
        finished = False
        for stream in self._receives:
            while self._recv_some(stream):
                pass
            finished = finished or stream.done()
        if finished:
            self._receives = [stream for stream in self._receives if not stream.done()]

    def _recv_some(self, stream: _Stream) -> bool:
        """Receive for the stream's current flow; whether it is worth trying again at once."""
        flow: Optional[_Receipt] = stream.flows[stream.index] if stream.index < len(stream.flows) else None
        views: List[memoryview] = []
        wanted = stream.header_left
        if wanted:
            views.append(stream.header[HEADER_BYTES - wanted :])
        if flow is not None and flow.position < flow.stop:
            room = self._room(stream.link.peer, flow)
            if room is not None:
                views.append(room)
                wanted += room.nbytes
        if not wanted:
            # Nothing to receive now: complete, or waiting for other peers or other flows.
            return self._step_over(stream, flow)
        got = stream.link.recv(views)
        if not got:
            return False
        self.moved_bytes += got
        if stream.header_left:
            used = min(got, stream.header_left)
            stream.header_left -= used
            if not stream.header_left:
                self._check_header(stream)
        else:
            used = 0
        if flow is not None and got > used:
            if flow.fold:
                flow.arrived[stream.link.peer] += got - used
                self._fold(flow, partial=False)
            else:
                flow.position += got - used
        return got == wanted

    def _room(self, peer: int, flow: _Receipt) -> Optional[memoryview]:
        """Where bytes from this peer may go now; None if nowhere."""
        if flow.fold:
            arrived = flow.arrived[peer]
            end = min(flow.stop, flow.window + self._pool.segment_bytes)
            if end == arrived:
                return None
            return self._pool.segment(peer).data[arrived - flow.window : end - flow.window]
        limit = flow.limit()
        return self._views[DATA][flow.position : limit] if limit > flow.position else None

    def _check_header(self, stream: _Stream) -> None:
        if stream.header != self._packed:
            mine, theirs = unpack_header(self._packed), unpack_header(stream.header)
            raise MismatchError(explain_difference(mine, theirs), rank=self._rank, peer=stream.link.peer)

    def _fold(self, flow: _Receipt, partial: bool) -> bool:
        """Combine what all peers have delivered; whether anything was combined."""
        end = min(flow.stop, flow.window + self._pool.segment_bytes)
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
            if stream.header_left or flow is None or self._room(stream.link.peer, flow) is not None:
                reading.append(stream.link)
        writing: List[Link] = []
        for stream in self._sends:
            flow = stream.flows[stream.index] if stream.index < len(stream.flows) else None
            if stream.header_left or flow is None or flow.limit() > flow.position:
                writing.append(stream.link)
        if not self._sends and not self._receives:
            writing = [link for link in self._links if not link.settled()]
        return reading, writing


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
