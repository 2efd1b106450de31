"""What one rank's part in a collective consists of: positions that move, streams, headers, memory.

:class:`Part` is the interface between the loop (:mod:`.drive`) and the executors. Every step of a schedule
becomes a :class:`Flow`, whose position moves from the start to the end of its span. A flow may go as far as
the flows that it depends on have come (:meth:`Flow.limit`), so sending a span chases the fold that produces
it, and no step waits for another to finish.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ..dtypes import Array
from ..errors import MismatchError
from ..schedule.steps import Recv, Step, exchange_lengths
from ..transport.base import Link
from ..wire.frames import HEADER_BYTES, Header, unpack_header
from ..wire.signature import explain_difference
from .reduce import Workspace

Counts = Dict[int, Tuple[int, int]]
"""Bytes sent and received, by peer."""


def summed(counts: Iterable[Counts]) -> Counts:
    """Return the sums by peer."""
    total: Counts = {}
    for peer, (sent, received) in (item for part in counts for item in part.items()):
        before = total.get(peer, (0, 0))
        total[peer] = (before[0] + sent, before[1] + received)
    return total


class Part(ABC):
    """One rank's part in one collective, which can be repeated: :meth:`arm` it, then :meth:`advance`."""

    moved_bytes: int  # since it was armed; grows whenever anything moves
    waits_for: Tuple[int, ...] = ()  # the peers from which it waited to receive when it last slept
    # By peer, how long it has slept in all runs until that peer's bytes arrived. If it waited for several
    # peers at once, each has an equal part of that time.
    slept_s: Dict[int, float]

    @abstractmethod
    def arm(self, sequence: int, data: Array, source: Optional[Array] = None) -> None:
        """Get ready to run with these flat contiguous arrays: the result grows in ``data``, ``source`` is
        only read. ``sequence`` is for the header.
        """

    @abstractmethod
    def disarm(self) -> None:
        """Release the caller's arrays, so that a kept execution does not keep them alive."""

    @abstractmethod
    def advance(self) -> bool:
        """Move everything that can move without waiting; return whether the collective is complete on this
        rank. Raises LinkClosed if a peer is gone, MismatchError if it is in another collective.
        """

    @abstractmethod
    def exchanged(self) -> Counts:
        """Return the bytes exchanged since this was armed; approximate while it runs."""

    @abstractmethod
    def volume(self) -> Counts:
        """Return the bytes that each run exchanges. For any thread."""

    @abstractmethod
    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        """Return the links that could move if they were (readable, writable)."""


class Headers:
    """The headers of one call, by peer: they differ in the number of elements exchanged with it.

    Peers with equal headers share the bytes, so most calls have a single one to stamp. The lengths of
    ``header`` are filled in here from the schedule, the number of a call by :func:`~..wire.frames.stamp`.
    """

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
    """Receiving segments, one per peer, packets, and working space, kept from one collective to the next. One
    execution at a time uses them. ``segment_bytes`` 0: the link's preference.
    """

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

    __slots__ = ("_first", "buffers", "current", "flows", "header", "header_left", "index", "link", "segment")

    def __init__(self, link: Link, header: memoryview) -> None:
        self.link = link
        self.header = header
        self.segment: Optional[Segment] = None
        self.flows: List[Any] = []
        self.buffers: List[int] = []
        self.header_left = HEADER_BYTES  # bytes of it that have not passed yet
        self.index = self._first = -1
        self.current: Any = None  # the flow that the next bytes belong to; None: all are complete

    def rewind(self) -> None:
        """Go back to the header and the first flow."""
        self.header_left = HEADER_BYTES
        self.index = self._first
        self.current = self.flows[self._first] if self._first >= 0 else None

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

    def seal(self) -> None:
        """Find the first flow that has anything to move, when all flows are known."""
        self._first = next((index for index, flow in enumerate(self.flows) if flow.start < flow.stop), -1)

    def step(self) -> None:
        """Continue with the next flow that has anything left to move."""
        flows, index = self.flows, self.index + 1
        while index < len(flows) and flows[index].position == flows[index].stop:
            index += 1
        self.index = index
        self.current = flows[index] if index < len(flows) else None
