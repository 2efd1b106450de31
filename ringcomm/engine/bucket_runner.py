"""Runs buckets: from the arrays of many requests to calls of one runner, and back.

How a bucket is divided into calls depends on signatures alone, never on anything that may differ between
ranks: all of them must make the same calls.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from math import prod
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ..arrays.kinds import BlockMirror
from ..codec.codecs import BLOCK_ITEMS
from ..collective.observe import OperationTotal, Progress, Tally, Totals
from ..collective.reduce import multiply, restore, weigh, weighable
from ..collective.rows import RowLayout, cumulative
from ..collective.runner import Runner
from ..configuration.settings import ALONE_BYTES
from ..dtypes import Array, dtype_named
from ..errors import RingcommError, ShapeError, UnsupportedDtypeError
from ..ops import Collective, ReduceOp
from ..transport.base import Fabric, Subset
from ..wire.signature import Key, Signature, ahead_of, direct_call
from .observer import Observer
from .process_sets import ProcessSets
from .repeats import RepeatedSet
from .request import Work

Mirrors = Dict[int, BlockMirror]
"""Of arrays that devices hold, by the identity of the array that is the mirror's block. They are loaded when
they are submitted (:mod:`ringcomm.arrays`), so here only the rest of that is waited for."""


class FusionBuffer:
    """Memory in which small tensors travel side by side; kept, and grown when needed."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def items(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Room for so many elements."""
        nbytes = count * dtype.itemsize
        if self._bytes.size < nbytes:
            from ..transport.arena import shared_room  # a program of small arrays does not load it

            shared = shared_room(nbytes)
            self._bytes = np.empty(nbytes, np.uint8) if shared is None else shared
        return self._bytes[:nbytes].view(dtype)


def bucket_text(bucket: Sequence[Work]) -> str:
    """Return what a bucket is for, in the program's own terms."""
    signature, request = bucket[0]
    key = Key(signature.process_set, signature.name, 0) if request is None else request.key
    others = len(bucket) - 1
    more = "" if not others else " and another" if others == 1 else f" and {others} others"
    return f"{signature.describe(named=False)} {key}{more}"


def nothing(activity: str = "") -> None:
    """Do nothing: the results are in place already, or no observer is told of an activity."""


def arrays_of(work: Work) -> List[Array]:
    """The arrays of a member; neutral ones if this rank has joined."""
    signature, request = work
    if request is not None:
        return request.arrays
    return [
        neutral(prod(shape), dtype_named(dtype), ReduceOp(signature.op), signature.prescale)
        for shape, dtype in zip(signature.shapes, signature.dtypes)
    ]


def neutral(count: int, dtype: np.dtype[Any], op: ReduceOp, prescale: float = 1.0) -> Array:
    """Return the neutral contribution: it leaves the other ranks' numbers as they are."""
    if op == ReduceOp.PRODUCT:
        return np.ones(count, dtype)
    if op in (ReduceOp.MIN, ReduceOp.MAX) and prescale != 0.0:  # times 0 everything is 0
        highest = (op == ReduceOp.MIN) == (prescale > 0.0)
        if dtype.kind == "b":
            return np.full(count, highest, dtype)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            return np.full(count, info.max if highest else info.min, dtype)
        return np.full(count, np.inf if highest else -np.inf).astype(dtype)
    return np.zeros(count, dtype)


def side_by_side(
    group: Sequence[Array], buffer: FusionBuffer, note: Callable[[str], None] = nothing, block_items: int = 1
) -> Tuple[Array, Callable[[], None]]:
    """Return arrays of one type as one, in place if they are neighbours, and what brings the results back.

    ``block_items``: each array begins at a multiple of so many elements, as codecs need it.
    """
    joined = group[0] if len(group) == 1 else as_one(group) if block_items == 1 else None
    if joined is not None:
        return joined, nothing
    starts = [0]
    for array in group:
        starts.append(starts[-1] + -(-array.size // block_items) * block_items)
    packed = buffer.items(starts[-1], group[0].dtype)
    note("MEMCPY_IN_FUSION_BUFFER")
    if block_items == 1:
        np.concatenate(group, out=packed)
    else:
        for array, start, stop in zip(group, starts, starts[1:]):
            packed[start : start + array.size] = array
            packed[start + array.size : stop] = 0
    note("")

    def unpack() -> None:
        note("MEMCPY_OUT_FUSION_BUFFER")
        for array, start in zip(group, starts):
            array[:] = packed[start : start + array.size]
        note("")

    return packed, unpack


def tensors_of(bucket: Sequence[Work]) -> List[Tuple[Array, Tuple[int, ...]]]:
    return [(array, shape) for work in bucket for array, shape in zip(arrays_of(work), work[0].shapes)]


def per_work(outputs: Sequence[Any], bucket: Sequence[Work]) -> List[Any]:
    """The outputs as lists, one per member; an error in place of those of which one is an error."""
    results: List[Any] = []
    start = 0
    for signature, _ in bucket:
        stop = start + len(signature.shapes)
        problems = [item for item in outputs[start:stop] if isinstance(item, RingcommError)]
        results.append(problems[0] if problems else list(outputs[start:stop]))
        start = stop
    return results


def groups_by_index(arrays: Sequence[Array], sizes: Sequence[int] = ()) -> List[List[int]]:
    """Return which arrays travel as one: small ones of a type, by ``sizes`` over all ranks, or else alone."""
    groups: List[List[int]] = []
    small: Dict[np.dtype[Any], List[int]] = {}
    for index, array in enumerate(arrays):
        size = sizes[index] if sizes else array.size
        if size * array.itemsize >= ALONE_BYTES:
            groups.append([index])
        elif array.dtype in small:
            small[array.dtype].append(index)
        else:
            small[array.dtype] = [index]
            groups.append(small[array.dtype])
    return groups


def as_one(arrays: Sequence[Array]) -> Optional[Array]:
    """One array over all of these if they follow each other in the memory of one owner."""
    first = arrays[0]
    owner = first.base
    if owner is None:
        return None
    end = first.__array_interface__["data"][0] + first.nbytes
    for array in arrays[1:]:
        if array.base is not owner or array.__array_interface__["data"][0] != end:
            return None
        end += array.nbytes
    total = sum([array.size for array in arrays])
    return np.lib.stride_tricks.as_strided(first, (total,), (first.itemsize,))


# ---- arrays on devices ---------------------------------------------------------------------------


def fetch_all(arrays: Sequence[Any], mirrors: Mirrors, runner: Runner) -> None:
    """Wait until those of the arrays that devices hold have been loaded."""
    for array in arrays:
        if id(array) in mirrors:
            runner.fetch(mirrors[id(array)])


def store_all(arrays: Sequence[Any], mirrors: Mirrors) -> None:
    """Start copying those of the arrays that devices hold back to them."""
    for array in arrays:
        if id(array) in mirrors:
            mirrors[id(array)].store(0, array.nbytes)


_MAX_TALLIES = 1000
"""Programs that give each step's tensors new names have no names in the sums of operations beyond this."""


class BucketRunner:
    """Executes the buckets that responses name, of which it counts all, and has the sets that repeat."""

    def __init__(self, fabric: Fabric, make_runner: Callable[[Fabric], Runner], sets: ProcessSets) -> None:
        self.may_poll: Optional[Callable[[], bool]] = None
        self._note: Callable[[str], None] = nothing  # called when an activity begins, or ends
        self._fabric = fabric
        self._make_runner = make_runner
        self.sets = sets
        self._runners: Dict[Tuple[int, ...], Runner] = {}
        self.count = 0
        self._active: Optional[Runner] = None
        self._buffer = FusionBuffer()
        self._residuals = FusionBuffer()
        self._mirrors: Mirrors = {}
        self._tallies: Dict[Tuple[Any, ...], Tally] = {}
        self.repeated: List[RepeatedSet] = []

    def release(self) -> None:
        """Free all buffers: this rank has left the job, but the program may go on."""
        self._buffer, self._residuals = FusionBuffer(), FusionBuffer()
        for runner in self._runners.values():
            runner.release()

    def run(
        self, bucket: Sequence[Work], observer: Optional[Observer] = None, traced: Sequence[Any] = ()
    ) -> List[Any]:
        """Run one bucket; what each member's handle is to give, in order. ``traced``: for the observer."""
        first = bucket[0][0]
        runner = self._runner(first.process_set)
        runner.may_poll = self.may_poll
        runner.purpose = lambda: bucket_text(bucket)
        runner.tally = self._tally(bucket)
        self._active = runner
        for _, request in bucket:
            if request is not None and request.mirrors:
                pairs = zip(request.arrays, request.mirrors)
                self._mirrors.update((id(array), mirror) for array, mirror in pairs if mirror is not None)
        try:
            if observer is not None:
                observer.started(traced)
                self._note = partial(observer.activity, traced)
            if self._mirrors and first.kind not in _STORING:
                fetch_all([array for work in bucket for array in arrays_of(work)], self._mirrors, runner)
            results: List[Any] = _DO[Collective(first.kind)](self, runner, bucket)
        finally:
            self._mirrors = {}
            self._active = runner.purpose = runner.tally = None
            self._note = nothing
            if observer is not None:
                observer.ended(traced)
        return results

    def _tally(self, bucket: Sequence[Work]) -> Optional[Tally]:
        """Return what counts buckets that begin with this operation; None if there are too many names."""
        first = bucket[0][0]
        key = (first.process_set, first.kind, first.name, len(bucket))
        found = self._tallies.get(key)
        if found is None and len(self._tallies) < _MAX_TALLIES:
            found = self._tallies[key] = Tally(bucket_text(bucket))
        return found

    def progress(self) -> Progress:
        """Return how far this rank is, in buckets. For any thread, and at any time."""
        active, sequence = self._active, 2 * self.count
        if active is None:
            return Progress(sequence)
        progress = active.progress()
        return progress._replace(sequence=sequence, doing=progress.doing or "copying into one buffer")

    @property
    def reduced_bytes(self) -> int:
        repeated = sum(item.total.runs * item.nbytes for item in list(self.repeated))
        return repeated + sum(runner.reduced_bytes for runner in self._runners.values())

    def totals(self) -> Totals:
        """Return what the collectives of all buckets have done so far. For any thread."""
        totals = Totals()
        for runner in list(self._runners.values()):
            totals.merge(runner.totals())
        for item in list(self.repeated):
            if item.total.runs:
                self._add_repeats(item, totals)
        for tally in list(self._tallies.values()):
            tally.move(totals)
        return totals

    def _add_repeats(self, item: RepeatedSet, totals: Totals) -> None:
        runs, took_s, bytes_each_way = item.total.runs, item.total.took_s, item.total.runs * item.nbytes
        peers = [peer for peer in range(self._fabric.size) if peer != self._fabric.rank]
        for peer in peers:
            totals.peer(peer).exchanged(bytes_each_way, bytes_each_way)
        first = item.signatures[0]
        text = bucket_text([(signature, None) for signature in item.signatures])
        for sums, name in ((totals.kinds, first.verb), (totals.operations, text)):
            sums.setdefault(name, OperationTotal()).add(runs, took_s, 2 * bytes_each_way * len(peers))

    def delivered(self) -> Dict[int, Tuple[int, float]]:
        from ..transport.tcp import delivered  # asked for once a second at most, and of TCP links

        return delivered(self._fabric)

    def moved_bytes(self, process_set: int) -> int:
        """Return how far a process set's collective is, or was when it failed; for any thread."""
        runner = self._runners.get(self.sets.members(process_set))
        rows = runner.rows() if runner is not None else []
        return int(rows[-1].get("moved", 0)) if rows else 0

    def _runner(self, process_set: int) -> Runner:
        members = self.sets.members(process_set)
        runner = self._runners.get(members)
        if runner is None:
            whole = len(members) == self._fabric.size
            fabric = self._fabric if whole else Subset(self._fabric, members)
            runner = self._runners[members] = self._make_runner(fabric)
        return runner

    # ---- reductions --------------------------------------------------------------------------

    def _all_reduce(self, runner: Runner, bucket: Sequence[Work]) -> List[Any]:
        first, mirrors = bucket[0][0], self._mirrors
        arrays = [array for work in bucket for array in arrays_of(work)]
        if not (first.weighted or first.codec or first.op == ReduceOp.ADASUM):
            self._reduce(runner, first, arrays, mirrors)
            return [None] * len(bucket)
        fetch_all(arrays, mirrors, runner)
        weighted = _weighted(runner, bucket, arrays)
        if first.op == ReduceOp.ADASUM:
            for array in arrays:
                adasum(runner, array, first.prescale, first.postscale)
        elif first.codec:
            self._all_reduce_coded(runner, bucket, weighted)
        else:
            self._reduce(runner, first, weighted, {})
        for array, result in zip(arrays, weighted):
            restore(array, result)
        store_all(arrays, mirrors)
        return [None] * len(bucket)

    def _reduce(self, runner: Runner, like: Signature, arrays: Sequence[Array], mirrors: Mirrors) -> None:
        """Reduce arrays alike; one with a mirror that runs alone may be reduced on its device."""
        for indices in groups_by_index(arrays):
            group = [arrays[index] for index in indices]
            mirror = mirrors.get(id(group[0])) if mirrors and len(group) == 1 else None
            if mirrors and mirror is None:
                fetch_all(group, mirrors, runner)
            packed, unpack = side_by_side(group, self._buffer, self._note)
            with runner.loaded(mirror, None, (0, packed.size)):
                self._call(runner, packed, like)
            unpack()
            if mirrors and mirror is None:
                store_all(group, mirrors)

    def _all_reduce_coded(self, runner: Runner, bucket: Sequence[Work], arrays: Sequence[Array]) -> None:
        """Reduce with a codec: every tensor begins with a block of its own, so that none coarsens another."""
        first = bucket[0][0]
        residuals: List[Optional[Array]] = []  # one for each array; None where there is no error feedback
        for signature, request in bucket:
            residuals += (request.residuals if request is not None else ()) or [None] * len(signature.shapes)
        for indices in groups_by_index(arrays):
            group, kept = [arrays[i] for i in indices], [residuals[i] for i in indices]
            packed, unpack = side_by_side(group, self._buffer, block_items=BLOCK_ITEMS)
            feedback: Optional[Array] = None
            unpack_feedback: Callable[[], None] = nothing
            if any(item is not None for item in kept):
                present = [
                    np.zeros(array.size, np.float32) if item is None else item
                    for array, item in zip(group, kept)
                ]
                feedback, unpack_feedback = side_by_side(
                    present, self._residuals, block_items=BLOCK_ITEMS
                )
            self._call(runner, packed, first, first.codec, feedback)
            unpack()
            unpack_feedback()

    def _call(
        self, runner: Runner, packed: Array, like: Signature, codec: int = 0, residuals: Any = None
    ) -> None:
        self._note("RINGCOMM_ALLREDUCE")
        runner.all_reduce(packed, _reduction(Collective.ALLREDUCE, packed, like, codec=codec), residuals)
        self._note("")

    def _reduce_scatter(self, runner: Runner, bucket: Sequence[Work]) -> List[Any]:
        first = bucket[0][0]
        tensors = tensors_of(bucket)
        outputs: List[Any] = [None] * len(tensors)
        edges = [item for signature, _ in bucket for item in signature.edges()]
        arrays = _weighted(runner, bucket, [flat for flat, _ in tensors])
        if first.codec:  # for which there are all-reduces only
            self._all_reduce_coded(runner, bucket, arrays)
            for index, (flat, shape) in enumerate(tensors):
                restore(flat, arrays[index])
                start, stop = edges[index][runner.rank : runner.rank + 2]
                outputs[index] = flat.reshape(shape)[start:stop].copy()
            return per_work(outputs, bucket)
        for indices in groups_by_index(arrays):
            flats, shapes = [arrays[index] for index in indices], [tensors[index][1] for index in indices]
            layout = RowLayout([edges[index] for index in indices], [shape[1:] for shape in shapes])
            packed = flats[0]
            if len(indices) > 1:
                packed = self._buffer.items(layout.bounds[-1], packed.dtype)
                layout.pack(flats, packed)
            runner.reduce_scatter(
                packed, _reduction(Collective.REDUCESCATTER, packed, first, bounds=layout.bounds)
            )
            for index, own in zip(indices, layout.pieces(packed, runner.rank)):
                outputs[index] = np.empty(own.shape, tensors[index][0].dtype)
                restore(outputs[index], own)
        return per_work(outputs, bucket)

    # ---- movement ----------------------------------------------------------------------------

    def _all_gather(self, runner: Runner, bucket: Sequence[Work]) -> List[Any]:
        tensors = tensors_of(bucket)
        rows = [count for _, request in bucket if request is not None for count in request.rows]
        kind, byte = Collective.ALLGATHER, np.dtype(np.uint8)
        table = runner.exchange(rows, ahead_of(kind, byte, "", (len(rows),)))
        outputs: List[Any] = [None] * len(tensors)
        edges = [cumulative(column) for column in table.T.tolist()]
        sizes = [rows[-1] * prod(inner) for rows, (_, inner) in zip(edges, tensors)]
        for indices in groups_by_index([flat for flat, _ in tensors], sizes):
            flats, inner = zip(*(tensors[index] for index in indices))
            layout = RowLayout([edges[index] for index in indices], inner)
            gathered = np.empty(layout.bounds[-1], flats[0].dtype)
            own = gathered[layout.bounds[runner.rank] : layout.bounds[runner.rank + 1]]
            np.concatenate(flats, out=own)
            runner.all_gather(gathered, direct_call(kind, gathered, bounds=layout.bounds))
            for index, joined in zip(indices, layout.join(gathered)):
                outputs[index] = joined
        return per_work(outputs, bucket)

    def _broadcast(self, runner: Runner, bucket: Sequence[Work]) -> List[Any]:
        for work in bucket:
            root = self.sets.members(work[0].process_set).index(work[0].root)
            arrays, mirrors = arrays_of(work), self._mirrors
            # Memory that the device shares is written to only after what the device has still to do there.
            shared = {key for key, mirror in mirrors.items() if mirror.shared}
            read = arrays if runner.rank == root else [item for item in arrays if id(item) in shared]
            fetch_all(read, mirrors, runner)
            for array in arrays:
                runner.broadcast(array, direct_call(Collective.BROADCAST, array, root=root))
            store_all(arrays, mirrors)
        return [None] * len(bucket)

    def _all_to_all(self, runner: Runner, bucket: Sequence[Work]) -> List[Any]:
        results: List[Any] = []
        for signature, request in bucket:
            assert request is not None
            flat, shape = request.arrays[0], signature.shapes[0]
            kind = Collective.ALLTOALL
            matrix = runner.exchange(request.splits, ahead_of(kind, flat.dtype, "", shape))
            received = matrix[:, runner.rank]
            sent = RowLayout([cumulative(request.splits)], [shape])
            layout = RowLayout([cumulative(received.tolist())], [shape])
            output = np.empty(layout.bounds[-1], flat.dtype)
            call = direct_call(kind, output, items=0)
            runner.all_to_all(flat, output, sent.bounds, layout.bounds, call)
            (rows,) = layout.join(output)
            results.append(rows if isinstance(rows, ShapeError) else (rows, received.astype(np.int32)))
        return results

    # ---- coordination ------------------------------------------------------------------------

    def _barrier(self, runner: Runner, bucket: Sequence[Work]) -> List[Any]:
        runner.barrier()
        return [None] * len(bucket)

    def _process_set(self, runner: Runner, bucket: Sequence[Work]) -> List[Any]:
        runner.barrier()
        return [self.sets.apply(signature.name) for signature, _ in bucket]


def _reduction(kind: Collective, packed: Array, like: Signature, **more: Any) -> Signature:
    """Return the direct call that reduces arrays as an operation asks for."""
    return direct_call(kind, packed, op=like.op, prescale=like.prescale, postscale=like.postscale, **more)


def _weighted(runner: Runner, bucket: Sequence[Work], arrays: Sequence[Array]) -> Sequence[Array]:
    """Return the arrays of a bucket, those of a weighted average multiplied by their relative weights."""
    if not bucket[0][0].weighted:
        return arrays
    weighted = [weighable(array) for array in arrays]
    left = iter(weighted)
    for signature, request in bucket:
        for array in islice(left, len(signature.shapes)):
            if request is not None and request.total is not None:
                weigh(array, request.total.share(request.weight, runner.size))
    return weighted


_DO = {
    Collective.ALLREDUCE: BucketRunner._all_reduce,
    Collective.ALLGATHER: BucketRunner._all_gather,
    Collective.REDUCESCATTER: BucketRunner._reduce_scatter,
    Collective.BROADCAST: BucketRunner._broadcast,
    Collective.ALLTOALL: BucketRunner._all_to_all,
    Collective.BARRIER: BucketRunner._barrier,
    Collective.PROCESS_SET: BucketRunner._process_set,
}
"""Unbound methods: an object that refers to itself would keep its buffers until garbage is collected."""


_STORING = (Collective.ALLREDUCE, Collective.BROADCAST)
"""Their results overwrite the arrays, so they load and store mirrors themselves."""


# ---- Adasum: a sum that does not overshoot where gradients agree ------------------------------------------

# Two gradients a and b become ``a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)``: their sum if they are
# orthogonal, their average if they are the same (Maleki et al., "Scaling Distributed Training with
# Adaptive Summation", MLSys 2021). Ranks combine in pairs at distances 1, 2, 4, ...; with any other
# number of ranks than a power of two, those beyond it first combine with one of the others.
#
# The two factors come from dot products, which BLAS adds up in another order on another processor or with
# another number of threads. So in each round one rank computes them for all ranks whose results must be the
# same; what follows is element by element, and the same everywhere.


def check_adasum(dtype: np.dtype[Any]) -> None:
    """Raise UnsupportedDtypeError if these are no floating-point numbers."""
    if dtype.kind != "f" and dtype.name != "bfloat16":
        raise UnsupportedDtypeError(f"Adasum needs floating-point numbers, not {dtype}.")


def dot(a: Array, b: Array) -> float:
    """The dot product of two vectors of float64, in whatever order BLAS adds it up here."""
    return float(a @ b)


def factors(a: Array, b: Array) -> Tuple[float, float]:
    """Return what two vectors are multiplied by before they are added up; not defined for complex ones."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    both, norm_a, norm_b = dot(a, b), dot(a, a), dot(b, b)
    return (
        1.0 - both / (2.0 * norm_a) if norm_a > 0.0 else 1.0,
        1.0 - both / (2.0 * norm_b) if norm_b > 0.0 else 1.0,
    )


def combine(a: Array, b: Array, by: Optional[Tuple[float, float]] = None) -> Array:
    """Return Adasum of two vectors, in the type of ``a``; ``by`` are their :func:`factors` if known."""
    factor_a, factor_b = factors(a, b) if by is None else by
    wide: Array = factor_a * a.astype(np.float64) + factor_b * b.astype(np.float64)
    # Which NaN an operation gives depends on the processor, and several ranks compute the same element.
    wide[np.isnan(wide)] = np.nan
    return wide.astype(a.dtype)


def adasum(runner: Runner, data: Array, prescale: float = 1.0, postscale: float = 1.0) -> None:
    """Replace ``data`` (flat) by the Adasum over all ranks of the runner, the same bits on each."""
    with np.errstate(all="ignore"):  # Overflow and NaN are the caller's numbers.
        multiply(data, prescale)
        _add_up(runner, data)
        multiply(data, postscale)


def _add_up(runner: Runner, data: Array) -> None:
    size, rank = runner.size, runner.rank
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    # Those beyond the power of two hand theirs to a partner, and get the result at the end.
    outside = rank - power if rank >= power else rank + power if rank < extra else -1
    theirs = _swap(runner, data, outside)
    if 0 <= rank < extra:
        data[:] = combine(data, theirs)
    distance = 1
    while distance < power:
        partner = rank ^ distance if rank < power else -1
        theirs = _swap(runner, data, partner)
        start = rank - rank % (2 * distance)
        group = range(start, start + 2 * distance if partner >= 0 else start)  # all with the same two vectors
        # The lower rank's first, on both sides: the same bits.
        first, second = (data, theirs) if rank < partner else (theirs, data)
        found = _hand_out(runner, group, factors(first, second) if rank in group[:1] else (0.0, 0.0))
        if partner >= 0:
            data[:] = combine(first, second, found)
        distance *= 2
    theirs = _swap(runner, data, outside)
    if rank >= power:
        data[:] = theirs


def _hand_out(runner: Runner, group: range, found: Tuple[float, float]) -> Tuple[float, float]:
    """Return what the first rank of a group has found; every rank must call it, those of no group, too."""
    first = runner.rank in group[:1]
    counts = [2 * (first and rank in group[1:]) for rank in range(runner.size)]
    source = np.resize(np.array(found), sum(counts))
    received = np.array(found)
    wanted = _to(runner, 2, group[0]) if group and not first else _to(runner, 0, -1)
    bounds = (0, *np.cumsum(counts).tolist())
    runner.all_to_all(source, received, bounds, wanted, direct_call(Collective.ALLTOALL, received, items=0))
    return float(received[0]), float(received[1])


def _swap(runner: Runner, data: Array, partner: int) -> Array:
    """Exchange whole vectors with a partner (-1: no partner); every rank must call it."""
    received = np.empty(data.size if partner >= 0 else 0, data.dtype)
    bounds, call = _to(runner, data.size, partner), direct_call(Collective.ALLTOALL, received, items=0)
    runner.all_to_all(data, received, bounds, bounds, call)
    return received


def _to(runner: Runner, items: int, partner: int) -> Tuple[int, ...]:
    """Chunk boundaries that give everything to one rank."""
    return tuple(items if 0 <= partner < rank else 0 for rank in range(runner.size + 1))
