"""Short messages: the header and elements for a peer are one packet, side by side.

:class:`~.execute.Execution` moves positions, so that nothing waits for more than it needs. For a few
kilobytes there is nothing to overlap, and keeping the positions would take longer than everything else
together. A :class:`ShortExecution` copies what it sends into packets, receives whole packets, and then
combines: a few system calls and little around them. The bytes on the wire are the same, so each rank decides
for itself which of the two it uses.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from ..dtypes import Array
from ..schedule.steps import DATA, SELF, Recv, Send, Step, exchange_lengths
from ..transport.base import Fabric, Link
from ..wire.frames import HEADER_BYTES, Header, stamp
from .execute import Counts, Execution, Headers, Part, SegmentPool, summed
from .reduce import Kernel

SHORT_BYTES = HEADER_BYTES + 16 * 1024
"""The longest packet. Copying one takes a microsecond; keeping positions takes ten or more."""
SHARED_BYTES = HEADER_BYTES + 128 * 1024
"""The same between ranks that share memory. There a packet is copied in the cache, and sent in one go; on a
network the received bytes of a long one are better passed on at once."""


class _Packet:
    """A packet to (or from) one peer in one stage: perhaps a header, then elements."""

    __slots__ = ("bytes", "elements", "header", "link", "rest")

    def __init__(self, link: Link, packet: Array, dtype: np.dtype[Any], header: Optional[bytearray]) -> None:
        self.link = link
        self.header = header
        self.bytes = self.rest = packet.data  # ``rest`` has not passed yet
        self.elements: Array = packet[0 if header is None else HEADER_BYTES :].view(dtype)

    def parts(self, steps: Sequence[Step]) -> List[Array]:
        """Return the elements that belong to each of the steps."""
        bounds = list(accumulate((step.stop - step.start for step in steps), initial=0))
        return [self.elements[start:stop] for start, stop in zip(bounds, bounds[1:])]


class _Copy(NamedTuple):
    """Elements of an array, and their place in a packet."""

    buffer: int
    span: slice
    part: Array


class _Fold(NamedTuple):
    """A step that combines elements of the data with operands in packets."""

    span: slice
    operands: List[Optional[Array]]  # None: the place of the data
    own: int  # that place
    final: bool


class _Stage:
    """Steps that go together: all messages are sent at once, then all receipts are awaited."""

    def __init__(self) -> None:
        self.sends: List[Send] = []
        self.receipts: List[Recv] = []
        self.packing: List[_Copy] = []
        self.outward: List[_Packet] = []
        self.inward: List[_Packet] = []
        self.arriving: List[Any] = []  # _Copy or _Fold, in the order of the schedule


def _stages(schedule: Sequence[Step]) -> Optional[List[_Stage]]:
    """Return the schedule in stages, or None if a stage would wait for more than the steps themselves do.

    A send that depends on a receipt begins a stage. That is only possible if there is no other receipt in the
    stage before, and all sends of the new stage depend on it: then nothing that a peer may be waiting for is
    held back. Headers without elements depend on nothing and go first: they are how ranks notice that they
    disagree about a broadcast.
    """
    first = _Stage()
    stages = [first]
    for step in schedule:
        empty = step.start == step.stop
        stage = first if empty else stages[-1]
        if isinstance(step, Recv):
            stage.receipts.append(step)
            continue
        if not empty and any(_depends(step, receipt) for receipt in stage.receipts):
            stage = _Stage()
            stages.append(stage)
        if not empty and len(stages) > 1:
            before = [receipt for receipt in stages[-2].receipts if receipt.start < receipt.stop]
            if len(before) != 1 or not _depends(step, before[0]):
                return None
        stage.sends.append(step)
    return stages


def _depends(step: Send, receipt: Recv) -> bool:
    return step.buffer == DATA and step.start < receipt.stop and receipt.start < step.stop


class ShortExecution(Part):
    """The quick form of :class:`~.execute.Execution` for short messages."""

    def __init__(
        self,
        stages: List[_Stage],
        fabric: Fabric,
        header: Header,
        dtype: np.dtype[Any],
        pool: SegmentPool,
        kernel: Optional[Kernel],
    ) -> None:
        schedule: List[Step] = []
        for stage in stages:
            schedule += [*stage.sends, *stage.receipts]
        self.headers = Headers(header, schedule, fabric.rank)
        self._dtype = dtype
        self._kernel: Any = kernel  # a schedule that folds has one
        self._workspace = pool.workspace
        self._stages = stages
        self._headed: List[_Packet] = []
        self.moved_bytes = 0
        self.slept_s = {}
        self._memory = pool.packets(sum(_room_for(stage, dtype) for stage in stages))
        known: Tuple[Set[int], Set[int]] = (set(), set())
        for stage in stages:
            self._compile_sends(stage, fabric, known[0])
            self._compile_receipts(stage, fabric, known[1])
        self._index = 0
        self._sends: List[_Packet] = []
        self._receives: List[_Packet] = []

    def _compile_sends(self, stage: _Stage, fabric: Fabric, sent: Set[int]) -> None:
        # Peers that get the same elements share a packet's bytes, which are then filled once.
        alike: Dict[Any, _Packet] = {}
        for peer, sends in _by_peer((step.peer, step) for step in stage.sends).items():
            header = self.headers.outgoing[peer] if peer not in sent else None
            sent.add(peer)
            packet = self._packet(fabric.link(peer), sends, header)
            if not packet.bytes.nbytes:
                continue
            key = (id(header), *((step.start, step.stop, step.buffer) for step in sends))
            if key in alike:
                packet.bytes = alike[key].bytes
            else:
                alike[key] = packet
                self._headed += [packet] if header is not None else []
                stage.packing += [
                    _Copy(step.buffer, slice(step.start, step.stop), part)
                    for step, part in zip(sends, packet.parts(sends))
                    if part.size
                ]
            stage.outward.append(packet)

    def _compile_receipts(self, stage: _Stage, fabric: Fabric, received: Set[int]) -> None:
        parts: Dict[Tuple[int, int], Array] = {}
        pairs = [(peer, index) for index, step in enumerate(stage.receipts) for peer in step.peers]
        for peer, indices in _by_peer(pairs).items():
            steps = [stage.receipts[index] for index in indices]
            header = self.headers.expected[peer] if peer not in received else None
            packet = self._packet(fabric.link(peer), steps, header)
            received.add(peer)
            if packet.bytes.nbytes:
                stage.inward.append(packet)
            for index, part in zip(indices, packet.parts(steps)):
                parts[peer, index] = part
        for index, step in enumerate(stage.receipts):
            span = slice(step.start, step.stop)
            if step.start < step.stop and step.fold:
                operands = [parts.get((peer, index)) for peer in step.fold]
                stage.arriving.append(_Fold(span, operands, step.fold.index(SELF), step.final))
            elif step.start < step.stop:
                stage.arriving.append(_Copy(DATA, span, parts[step.peers[0], index]))

    def _packet(self, link: Link, steps: Sequence[Step], header: Optional[bytearray]) -> _Packet:
        """Return a packet in the next of this execution's bytes."""
        count = sum(step.stop - step.start for step in steps)
        length = count * self._dtype.itemsize + (0 if header is None else HEADER_BYTES)
        packet = _Packet(link, self._memory[:length], self._dtype, header)
        self._memory = self._memory[_aligned(length) :]
        return packet

    def arm(self, sequence: int, data: Array, source: Optional[Array] = None) -> None:
        stamp(self.headers.packed, sequence)
        for packet in self._headed:
            packet.bytes[:HEADER_BYTES] = packet.header  # type: ignore[assignment]
        self._arrays = (data, data if source is None else source)
        self._index = -1
        self.moved_bytes = 0
        self._next_stage()

    def disarm(self) -> None:
        del self._arrays

    def _next_stage(self) -> bool:
        """Continue with the next stage, if there is one: fill its packets."""
        self._index += 1
        if self._index == len(self._stages):
            return False
        stage, arrays = self._stages[self._index], self._arrays
        for buffer, span, part in stage.packing:
            part[:] = arrays[buffer][span]
        for packet in stage.outward:
            packet.rest = packet.bytes
        for packet in stage.inward:
            packet.rest = packet.bytes
        self._sends, self._receives = stage.outward, stage.inward
        return True

    def advance(self) -> bool:
        while True:
            if self._sends:
                self._send()
            if self._receives:
                self._receive()
                if self._receives:
                    return False
                self._combine(self._stages[self._index])
            # Outgoing bytes are in packets, so the next stage may change the data; but bytes to one
            # peer must stay in order.
            if self._sends:
                return False
            if not self._next_stage():
                return True

    def _send(self) -> None:
        unsent: List[_Packet] = []
        for packet in self._sends:
            rest = packet.rest
            sent = packet.link.send_packet(rest)
            if sent:
                self.moved_bytes += sent
                packet.rest = rest[sent:]
            if sent < rest.nbytes:
                unsent.append(packet)
        self._sends = unsent

    def _receive(self) -> None:
        missing: List[_Packet] = []
        for packet in self._receives:
            rest = packet.rest
            got, left = packet.link.recv_packet(rest), rest.nbytes
            if got:
                self.moved_bytes += got
                packet.rest = rest[got:]
                if packet.header is not None and left - got <= packet.bytes.nbytes - HEADER_BYTES:
                    # As soon as it has arrived: of another call, more may never come.
                    self.headers.check(packet.link.peer, packet.bytes)
            if got < left:
                missing.append(packet)
        self._receives = missing

    def _combine(self, stage: _Stage) -> None:
        """Fold or copy the received packets, in schedule order."""
        data = self._arrays[DATA]
        for item in stage.arriving:
            out = data[item.span]
            if type(item) is _Copy:
                out[:] = item.part
            else:
                operands = item.operands
                operands[item.own] = out
                self._kernel.fold(out, operands, item.final, self._workspace)
                operands[item.own] = None

    def exchanged(self) -> Counts:
        begun = self._stages[: self._index + 1]
        return _counted(begun, lambda packet: packet.bytes.nbytes - packet.rest.nbytes)

    def volume(self) -> Counts:
        return _counted(self._stages, lambda packet: packet.bytes.nbytes)

    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        return [packet.link for packet in self._receives], [packet.link for packet in self._sends]


def _counted(stages: Sequence[_Stage], bytes_of: Callable[[_Packet], int]) -> Counts:
    sent = [{packet.link.peer: (bytes_of(packet), 0)} for stage in stages for packet in stage.outward]
    received = [{packet.link.peer: (0, bytes_of(packet))} for stage in stages for packet in stage.inward]
    return summed([*sent, *received])


def _by_peer(pairs: Iterable[Tuple[int, Any]]) -> Dict[int, List[Any]]:
    found: Dict[int, List[Any]] = {}
    for peer, item in pairs:
        found.setdefault(peer, []).append(item)
    return found


def _aligned(length: int) -> int:
    """Return the bytes to reserve for a packet, so that the next one begins at a cache line."""
    return -(-length // 64) * 64


def _room_for(stage: _Stage, dtype: np.dtype[Any]) -> int:
    """Return an upper bound on the bytes that the packets of a stage take."""
    lengths = [step.stop - step.start for step in stage.sends]
    lengths += [step.stop - step.start for step in stage.receipts for _ in step.peers]
    return sum(_aligned(HEADER_BYTES + length * dtype.itemsize) for length in lengths)


def make_execution(
    schedule: Sequence[Step],
    fabric: Fabric,
    header: Header,
    dtype: np.dtype[Any],
    pool: SegmentPool,
    kernel: Optional[Kernel] = None,
) -> Part:
    """Return the best part to run this schedule. The arguments are those of :class:`~.execute.Execution`."""
    lengths = exchange_lengths(schedule)
    counts = [HEADER_BYTES + count * dtype.itemsize for pair in lengths.values() for count in pair]
    shared = all(fabric.link(peer).peeks for peer in lengths)
    most, in_all = (SHARED_BYTES, 2 * SHARED_BYTES) if shared else (SHORT_BYTES, 4 * SHORT_BYTES)
    if max(counts, default=0) <= min(most, pool.segment_bytes or most) and sum(counts) <= in_all:
        stages = _stages(schedule)
        if stages is not None:
            return ShortExecution(stages, fabric, header, dtype, pool, kernel)
    return Execution(schedule, fabric, header, dtype, pool, kernel)
