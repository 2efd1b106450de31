"""An all-reduce whose messages are codes: encoding and decoding are flows beside sending and receiving.

The schedule is that of ``direct``, over a buffer of codes instead of the values. Every contribution is
encoded once, by its rank, and every finished sum once, by the rank that owns the chunk. The owner uses the
decoded sum as well, so all ranks end with the same bits. Codes are made segment by segment, not far ahead of
the sent bytes, and decoded when a segment is complete; so all passes over a segment stay in the cache and
overlap with the network.

**Error feedback.** With an array of residuals, the encoding error is kept and added to the next call's
contribution: on each rank for its messages, and on the owner for the result, in units of a contribution. Over
many calls nothing is lost: the sum of all results and the last residuals (of all ranks) is the sum of all
contributions. Where values were not finite the residual becomes zero.

**Several ranks per host** (:class:`HostCodedExecution`). They add up first, in float32, and every rank gets
one column of the host's sum. Ranks with the same place on their hosts exchange their column as codes, and the
ranks of a host gather the columns. A host then sends as much as a single rank would, and every element is
still encoded twice.
"""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..codec.codecs import BLOCK_ITEMS, SEGMENT_ITEMS, Codec, make_codec
from ..dtypes import Array
from ..ops import CODECS, ReduceOp
from ..schedule.hierarchy import Hosts, all_gather, reduce_scatter
from ..schedule.select import Selector
from ..schedule.steps import Recv, Send, Step, even_bounds
from ..transport.base import Fabric, Link
from ..wire.frames import Header
from .execute import Counts, Execution, Flow, Part, Receipt, SegmentPool, summed
from .reduce import Kernel

_AHEAD_BYTES = 256 * 1024
"""How far encoding runs ahead of sending: the bytes that a socket takes at once."""

_BYTE = np.dtype(np.uint8)


class CodedMemory:
    """Working space for one codec (its place in :data:`ringcomm.ops.CODECS`). For one thread at a time."""

    def __init__(self, number: int) -> None:
        self.codec: Codec = make_codec(CODECS[number])
        self.segment_bytes = self.codec.encoded_bytes(SEGMENT_ITEMS)
        self.pool = SegmentPool(self.segment_bytes)
        self.sums = np.empty(SEGMENT_ITEMS, np.float32)
        self.operand = np.empty(SEGMENT_ITEMS, np.float32)
        self._codes = np.empty(0, np.uint8)

    def codes(self, nbytes: int) -> Array:
        """Return memory for the codes of a vector."""
        if self._codes.size < nbytes:
            self._codes = np.empty(nbytes, np.uint8)
        return self._codes[:nbytes]

    def bounds(self, values: Sequence[int]) -> Tuple[int, ...]:
        """Return the start of each chunk's codes in a buffer, from the chunks' boundaries in values."""
        found = [0]
        for start, stop in zip(values, values[1:]):
            found.append(found[-1] + self.codec.encoded_bytes(stop - start))
        return tuple(found)


class _Conversion(NamedTuple):
    """A span to encode or decode."""

    flow: Flow  # the progress
    other: Flow  # sends or receives the codes
    first: int  # of its values in the vector
    last: int


class CodedExecution(Execution):
    """A part that runs a schedule of codes; `arm` takes float32 as `data` and residuals as `source`."""

    _folds_in_place = False

    def __init__(
        self,
        schedule: Sequence[Step],  # in bytes of codes
        fabric: Fabric,
        header: Header,
        memory: CodedMemory,
        kernel: Kernel,
        bounds: Sequence[int],  # of chunks, in values
        codes: Sequence[int],  # of chunks, in bytes of codes
    ) -> None:
        super().__init__(schedule, fabric, header, _BYTE, memory.pool, kernel)
        self._memory = memory
        self._codec = memory.codec
        self._sum_kernel = kernel
        self._encodings: List[_Conversion] = []
        self._decodings: List[_Conversion] = []
        self._codes_bytes = codes[-1]
        self._folded: Dict[Receipt, Tuple[int, int]] = {}
        spans = {(low, high): place for low, high, place in zip(codes, codes[1:], zip(bounds, bounds[1:]))}
        for step, flow in zip(schedule, self._flows):
            if step.start < step.stop:
                first, last = spans[step.start, step.stop]
                self._convert(step, flow, first, last)

    def _convert(self, step: Step, flow: Flow, first: int, last: int) -> None:
        """Attach encoding to a step that sends a contribution, decoding to one that receives a result."""
        if isinstance(step, Recv):
            assert isinstance(flow, Receipt)
            if step.fold:
                self._folded[flow] = (first, last)
            else:
                self._decodings.append(_Conversion(Flow(step.start, step.stop), flow, first, last))
        elif isinstance(step, Send) and not any(isinstance(other, Receipt) for other in flow.before):
            conversion = _Conversion(Flow(step.start, step.stop), flow, first, last)
            flow.before = (*flow.before, conversion.flow)
            self._encodings.append(conversion)

    def arm(self, sequence: int, data: Array, source: Optional[Array] = None) -> None:
        super().arm(sequence, self._memory.codes(self._codes_bytes))
        self._values = data
        self._residuals = source
        for conversion in (*self._encodings, *self._decodings):
            conversion.flow.rewind()

    def disarm(self) -> None:
        super().disarm()
        del self._values, self._residuals

    def _advance_sends(self) -> None:
        self._encode_ahead()
        super()._advance_sends()

    def _advance_receives(self) -> None:
        super()._advance_receives()
        self._decode_arrived()

    # ---- segments ----------------------------------------------------------------------------

    def _places(self, flow: Flow, first: int, last: int) -> Tuple[slice, slice]:
        """Return the places of the flow's next segment: in the buffer of codes, and in the vector."""
        number = (flow.position - flow.start) // self._memory.segment_bytes
        start = first + number * SEGMENT_ITEMS
        end = min(flow.stop, flow.position + self._memory.segment_bytes)
        return slice(flow.position, end), slice(start, min(last, start + SEGMENT_ITEMS))

    def _encode_ahead(self) -> None:
        """Encode at most one segment for each peer to which nearly all encoded bytes have been sent."""
        for flow, sending, first, last in self._encodings:
            if flow.position == flow.stop or flow.position - sending.position >= _AHEAD_BYTES:
                continue
            codes, place = self._places(flow, first, last)
            values = self._values[place]
            if self._residuals is None:
                self._codec.encode(values, self._data[codes])
            else:
                np.add(values, self._residuals[place], out=values)
                self._encode_with_residuals(values, codes, place)
            self._moved(flow, codes)

    def _encode_with_residuals(self, values: Array, codes: slice, place: slice) -> Tuple[Array, Array]:
        """Encode values and store the errors; return what is decoded, and the errors."""
        assert self._residuals is not None
        residuals, decoded = self._residuals[place], self._memory.operand[: values.size]
        finite = self._codec.encode(values, self._data[codes], decoded)
        np.subtract(values, decoded, out=residuals)
        if not finite:
            residuals[~np.isfinite(residuals)] = 0  # one overflow must not spoil all later calls
        return decoded, residuals

    def _decode_arrived(self) -> None:
        """Decode all complete segments of results."""
        for flow, receiving, first, last in self._decodings:
            while flow.position < flow.stop:
                codes, place = self._places(flow, first, last)
                if receiving.position < codes.stop:
                    break
                self._codec.decode(self._data[codes], self._values[place])
                self._moved(flow, codes)

    def _moved(self, flow: Flow, codes: slice) -> None:
        self.moved_bytes += codes.stop - flow.position
        flow.position = codes.stop

    def _fold(self, flow: Receipt, partial: bool) -> bool:
        """Combine a segment once all peers have sent it, and encode the result."""
        codes, place = self._places(flow, *self._folded[flow])
        if flow.position == flow.stop or min(flow.arrived.values()) < codes.stop:
            return False
        values = self._values[place]
        if self._residuals is not None:
            np.add(values, self._residuals[place], out=values)
        self._combine(flow, values, codes.stop - codes.start)
        if self._residuals is None:
            self._codec.encode(values, self._data[codes], values)
        else:
            decoded, residuals = self._encode_with_residuals(values, codes, place)
            np.multiply(residuals, self._sum_kernel.unit, out=residuals)
            np.copyto(values, decoded)
        self._moved(flow, codes)
        flow.window = flow.position
        return True

    def _combine(self, flow: Receipt, values: Array, nbytes: int) -> None:
        """Decode the peers' segments and add them to this rank's own values, in the order of the fold."""
        sums, operand = self._memory.sums[: values.size], self._memory.operand[: values.size]
        last = len(flow.operands) - 1
        for index, segment in enumerate(flow.operands):
            if segment is not None:
                target = sums if index == 0 else operand
                self._codec.decode(segment.elements[:nbytes], target)
                current = target
            else:
                current = values
            if index == 0:
                if segment is None:
                    np.copyto(sums, values)
            elif index < last:
                self._sum_kernel.fold(sums, [sums, current], final=False)
            else:
                self._sum_kernel.fold(values, [sums, current], final=True)


MakeCoded = Callable[[Tuple[int, ...], int], Part]
"""Makes the part that reduces a column of this many elements over these ranks with codes."""


class HostCodedExecution(Part):
    """Reduces inside the hosts, with codes between them (by ``make_coded``), and gathers inside the hosts."""

    def __init__(
        self, fabric: Fabric, header: Header, hosts: Hosts, count: int, pool: SegmentPool,
        make_coded: MakeCoded,
    ) -> None:  # fmt: skip
        local = next(ranks for ranks in hosts if fabric.rank in ranks)
        place = local.index(fabric.rank)
        edges = even_bounds(count, len(local))
        self._own = slice(edges[place], edges[place + 1])
        spans = [(0, 0)] * (max(rank for ranks in hosts for rank in ranks) + 1)
        for rank, span in zip(local, zip(edges, edges[1:])):
            spans[rank] = span
        single = np.dtype(np.float32)
        add = Kernel(ReduceOp.SUM, single, len(local))
        inward = Execution(reduce_scatter(fabric.rank, (local,), spans), fabric, header, single, pool, add)
        coded = make_coded(tuple(ranks[place] for ranks in hosts), edges[place + 1] - edges[place])
        outward = Execution(all_gather(fabric.rank, (local,), spans), fabric, header, single, pool)
        self._stages: Tuple[Part, ...] = (inward, coded, outward)
        self.slept_s = {}
        self._stage = 0
        self._done_bytes = 0

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        """Return the bytes moved in all stages since it was armed."""
        return self._done_bytes + self._stages[self._stage].moved_bytes

    def arm(self, sequence: int, data: Array, source: Optional[Array] = None) -> None:
        self._armed = (sequence, data, source)
        if source is not None:
            # Of other columns, from calls before the hosts had these ranks.
            for others in (slice(0, self._own.start), slice(self._own.stop, None)):
                if source[others].any():
                    np.add(data[others], source[others], out=data[others])
                    source[others] = 0
        self._stage = self._done_bytes = 0
        self._stages[0].arm(sequence, data)

    def _arm_next(self) -> None:
        sequence, data, source = self._armed
        self._done_bytes += self._stages[self._stage].moved_bytes
        self._stages[self._stage].disarm()
        self._stage += 1
        if self._stage == 1:
            residuals = None if source is None else source[self._own]
            self._stages[1].arm(sequence, data[self._own], residuals)
        else:
            self._stages[2].arm(sequence, data)

    def disarm(self) -> None:
        self._stages[self._stage].disarm()
        del self._armed

    def advance(self) -> bool:
        while self._stages[self._stage].advance():
            if self._stage == len(self._stages) - 1:
                return True
            self._arm_next()
        return False

    def exchanged(self) -> Counts:
        return summed([stage.exchanged() for stage in self._stages[: self._stage + 1]])

    def volume(self) -> Counts:
        return summed([stage.volume() for stage in self._stages])

    def waiting_for(self) -> Tuple[List[Link], List[Link]]:
        return self._stages[self._stage].waiting_for()


class CodedPlans:
    """Makes the executions of coded all-reduces, which share working space."""

    def __init__(self, fabric: Fabric, selector: Selector) -> None:
        self._fabric = fabric
        self._selector = selector
        self._memories: Dict[int, CodedMemory] = {}
        self._pool = SegmentPool()

    def execution(self, header: Header, count: int, kernel: Kernel) -> Part:
        """Return the part that runs an all-reduce of ``count`` values with the header's codec."""
        hosts = self._selector.coded_hosts(count)
        if hosts is None:
            return self._coded(header, kernel, None, count)
        return HostCodedExecution(
            self._fabric, header, hosts, count, self._pool, partial(self._coded, header, kernel)
        )

    def _coded(
        self, header: Header, kernel: Kernel, ranks: Optional[Tuple[int, ...]], count: int
    ) -> CodedExecution:
        """Return the part in which some ranks (one per host), or all, exchange codes."""
        memory = self._memories.get(header.codec)
        if memory is None:
            memory = self._memories[header.codec] = CodedMemory(header.codec)
        bounds = self._selector.coded_bounds(count, BLOCK_ITEMS, ranks)
        codes = memory.bounds(bounds)
        schedule = self._selector.coded_all_reduce(codes, ranks)
        return CodedExecution(schedule, self._fabric, header, memory, kernel, bounds, codes)
