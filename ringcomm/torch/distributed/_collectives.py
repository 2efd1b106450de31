"""PyTorch's collectives on tensors, executed over a group's links; tensors are flat arrays that share memory.

:class:`GroupOperand` and :class:`Parts` make arrays of tensors, :class:`GroupReduction` is a ``ReduceOp``,
and :class:`Collectives` has the operations, which all block. Operations on tensors of devices run on host
memory, between the asynchronous copies of :class:`Staged`.
"""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from functools import lru_cache
from math import prod
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...arrays.kinds import DeviceKind, StagingPool, Wait, device_kind
from ...arrays.operands import DeviceOperand
from ...arrays.torch_tensors import TensorOperand
from ...collective.reduce import multiply
from ...collective.rows import check_rows, cumulative, row_counts
from ...collective.runner import Runner
from ...configuration.settings import LISTED_BYTES
from ...dtypes import Array
from ...errors import Misuse, UnsupportedDtypeError
from ...ops import Bitwise, Collective, ReduceOp
from ...schedule.steps import even_bounds
from ...wire.frames import NO_OP, NO_ROOT
from ...wire.signature import Signature, ahead_of, direct_call, sizes_text

Tensors = Sequence[torch.Tensor]
Divided = Union[torch.Tensor, Tensors]  # a tensor in equal parts, or one tensor for each rank

_KEPT_BYTES = 64 * 1024 * 1024  # scratch memory up to this size is kept for the next operation
# up to this size a reduce is an all-reduce: fewer rounds matter more than bytes
_REDUCE_ALL_BYTES = 64 * 1024

_PLAIN = frozenset((
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
))  # fmt: skip
"""The dtypes that NumPy also has."""
_REDUCIBLE = _PLAIN | {torch.bfloat16}
_WORDS: Dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype by which other dtypes are moved, by their size in bytes: only their bytes matter."""


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or its memory as integers if NumPy does not have its dtype."""
    if tensor.dtype in _PLAIN:
        return tensor
    word = _WORDS.get(tensor.dtype.itemsize)
    if word is None:
        raise UnsupportedDtypeError(f"elements of type {tensor.dtype} cannot be sent.")
    return tensor.view(word)


def tensors_inside(value: Any) -> List[str]:
    """Return the names of the tensors inside a tensor (or nested lists of such) that only wraps them."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    if type(value) in (torch.Tensor, torch.nn.Parameter) or not is_traceable_wrapper_subclass(value):
        return []
    names: List[str] = value.__tensor_flatten__()[0]
    if any(getattr(value, name).shape != value.shape for name in names):
        kind = type(value).__name__
        raise Misuse(f"a {kind} cannot be sent as a whole. Send the tensors that it consists of.")
    return names


def inside(value: Any, name: str) -> Any:
    """Return the tensor of this name in a tensor; of nested lists of tensors, such lists of these."""
    if type(value) in (list, tuple):
        return [inside(item, name) for item in value]
    return getattr(value, name) if isinstance(value, torch.Tensor) else value


class GroupOperand(TensorOperand):
    """A CPU tensor that the result of an operation overwrites. ``arithmetic``: the elements are computed
    with, not only moved. ``moved_as`` is its dtype as text if :attr:`flat` has another dtype, else "".
    """

    __slots__ = ("_arithmetic", "element", "moved_as")

    def __init__(self, tensor: torch.Tensor, arithmetic: bool = False) -> None:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise Misuse(
                f"The backend 'ringcomm' supports dense tensors in the CPU's memory; this one is on "
                f"{tensor.device} with layout {tensor.layout}."
            )
        if arithmetic and tensor.dtype not in _REDUCIBLE:
            raise UnsupportedDtypeError(f"elements of type {tensor.dtype} cannot be reduced.")
        self._arithmetic = arithmetic
        super().__init__(tensor)

    def _elements(self, host: torch.Tensor) -> Array:
        moved = host if self._arithmetic else _movable(host)
        self.element = host.dtype
        self.moved_as = "" if moved is host else str(host.dtype)
        return super()._elements(moved)


class Parts:
    """Parts of a tensor, or tensors side by side, as an array: its own memory, or copies in ``space``."""

    __slots__ = ("_copies", "array", "bounds", "element", "operands")

    def __init__(
        self, operands: List[GroupOperand], bounds: Tuple[int, ...], space: Optional[Array] = None
    ) -> None:
        self.operands = operands
        self.bounds = bounds
        self.element = operands[0].element
        self._copies = space is not None
        self.array: Array = operands[0].flat if space is None else space

    def load(self) -> Array:
        """Return the array, after copying the tensors to it."""
        if self._copies:
            np.concatenate([operand.flat for operand in self.operands], out=self.array)
        return self.array

    def part(self, number: int) -> Array:
        return self.array[self.bounds[number] : self.bounds[number + 1]]

    def finish(self) -> None:
        start = 0
        for operand in self.operands:
            if self._copies:
                start, begin = start + operand.flat.size, start
                operand.flat[...] = self.array[begin:start]
            operand.finish()


def _parts_of(tensor: torch.Tensor, rows: Sequence[Any], size: int) -> Tuple[int, ...]:
    """Return the boundaries of parts of so many rows, or (no ``rows``) of equal parts."""
    if rows:
        check_rows("alltoall", [tensor.shape])
        return cumulative(row_counts(int(tensor.shape[0]), rows, size), prod(tensor.shape[1:]))
    if tensor.numel() % size:
        raise Misuse(
            f"{tensor.numel()} elements cannot be divided equally among the {size} ranks of this group."
        )
    each = tensor.numel() // size
    return tuple(range(0, tensor.numel() + 1, each)) if each else (0,) * (size + 1)


@lru_cache(maxsize=None)
def type_code(dtype: torch.dtype) -> int:
    """Return the code of a dtype: 32 bits, the same in all versions of PyTorch, never 0."""
    return zlib.crc32(str(dtype).encode()) or 1


def type_name(code: int) -> str:
    """Return the name of the dtype with this code, for example ``float32``."""
    for dtype in vars(torch).values():
        if isinstance(dtype, torch.dtype) and type_code(dtype) == code:
            return str(dtype).replace("torch.", "")
    return "a type that this PyTorch does not have"


class GroupReduction(NamedTuple):
    """A reduction operation."""

    op: Any
    factor: float = 1.0  # this rank's contribution is multiplied by it
    name: str = ""  # in message headers

    @classmethod
    def of(cls, op: Any) -> GroupReduction:
        """Return the reduction for a ``ReduceOp`` of PyTorch; Misuse if the backend has none."""
        kind = getattr(op, "op", op)
        found = _KNOWN.get(kind)
        if found is not None:
            return found
        if kind == _KIND.PREMUL_SUM:
            if getattr(op.factor, "numel", lambda: 1)() != 1:
                raise Misuse("PREMUL_SUM needs one factor for the whole tensor, not a tensor of factors.")
            # All ranks must multiply; the factors may differ.
            return cls(ReduceOp.SUM, float(op.factor), "PREMUL_SUM")
        raise Misuse(f"{op!r} is not a reduction that the backend 'ringcomm' supports.")

    def labelled(self, label: str) -> GroupReduction:
        """Return the same reduction with a label appended to its name."""
        return self._replace(name=f"{self.name} {label}".strip())


_KIND = dist.ReduceOp.RedOpType
_KNOWN: Dict[Any, GroupReduction] = {
    _KIND.SUM: GroupReduction(ReduceOp.SUM), _KIND.AVG: GroupReduction(ReduceOp.AVERAGE),
    _KIND.MIN: GroupReduction(ReduceOp.MIN), _KIND.MAX: GroupReduction(ReduceOp.MAX),
    _KIND.PRODUCT: GroupReduction(ReduceOp.PRODUCT), _KIND.BAND: GroupReduction(Bitwise.BAND),
    _KIND.BOR: GroupReduction(Bitwise.BOR), _KIND.BXOR: GroupReduction(Bitwise.BXOR),
}  # fmt: skip


class Packed(NamedTuple):
    """Spans of a tensor that are averaged side by side in an array, with one codec."""

    codec: int  # its place in :data:`ringcomm.ops.CODECS`
    # start and stop of each span in the tensor, and its start in the array
    places: Sequence[Tuple[int, int, int]]
    array: Array  # float32
    residuals: Optional[Array]  # of error feedback, in the array's order; None: no error feedback


class Collectives:
    """The operations of one group, for one thread at a time."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.rank = runner.rank
        self.size = runner.size
        self._space: List[Array] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def _scratch(self, count: int, dtype: np.dtype[Any], index: int = 0) -> Array:
        """Return scratch memory, valid until the next operation."""
        nbytes = count * dtype.itemsize
        space = self._space[index]
        if space.size < nbytes:
            space = np.empty(nbytes, np.uint8)
            if nbytes <= _KEPT_BYTES:
                self._space[index] = space
        return space[:nbytes].view(dtype)

    # ---- reductions --------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, how: GroupReduction) -> None:
        if tensor.is_sparse:
            self._all_reduce_sparse(tensor, how)
            return
        operand = GroupOperand(tensor, arithmetic=True)
        self._reduce(operand.flat, how)
        operand.finish()

    def _reduce(self, data: Array, how: GroupReduction, intent: Optional[Signature] = None) -> None:
        multiply(data, how.factor)
        if intent is None:
            call = direct_call(Collective.ALLREDUCE, data, how.name, data.shape, int(how.op))
        else:
            call = intent.on(data)
        self.runner.all_reduce(data, call)

    def all_reduce_all(self, tensors: Tensors, how: GroupReduction) -> None:
        """Reduce several tensors; small ones of one dtype are fused."""
        small = [t for t in tensors if not t.is_sparse and t.numel() * t.element_size() <= LISTED_BYTES]
        together = len({t.dtype for t in small}) == 1 and len(small) > 1
        alone = [t for t in tensors if not together or not any(t is item for item in small)]
        if alone or not together:
            self.for_each(alone, lambda tensor, label: self.all_reduce(tensor, how.labelled(label)))
        if not together:
            return
        operands = [GroupOperand(tensor, arithmetic=True) for tensor in small]
        parts = self._copied(operands, cumulative(tensor.numel() for tensor in small))
        self._reduce(parts.load(), how, _divided(Collective.ALLREDUCE, how.name, parts, int(how.op)))
        parts.finish()

    def all_reduce_packed(self, tensor: torch.Tensor, parts: Sequence[Packed]) -> None:
        """Average parts of a tensor over all ranks, each with its codec, in place."""
        operand = GroupOperand(tensor, arithmetic=True)
        for codec, places, array, residuals in parts:
            for start, stop, place in places:
                array[place : place + stop - start] = operand.flat[start:stop]
            kind, op = Collective.ALLREDUCE, ReduceOp.AVERAGE
            call = direct_call(kind, array, "compressed gradients", op=op, codec=codec)
            self.runner.all_reduce(array, call, residuals)
            for start, stop, place in places:
                operand.flat[start:stop] = array[place : place + stop - start]
        operand.finish()

    def for_each(self, items: Sequence[Any], act: Callable[[Any, str], None]) -> None:
        """Call ``act`` with each tensor and a label with their number, which ranks compare."""
        if not items:
            self.runner.barrier("no tensors")
        for number, item in enumerate(items, start=1):
            act(item, f"tensor {number} of {len(items)}" if len(items) > 1 else "")

    def _all_reduce_sparse(self, tensor: torch.Tensor, how: GroupReduction) -> None:
        """Gather the entries of all ranks and add them; their number may differ."""
        if how.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise Misuse("sparse tensors can be summed and averaged only.")
        mine = tensor.coalesce()
        values, indices = mine.values().contiguous(), mine.indices()
        multiply(GroupOperand(values, arithmetic=True).flat, how.factor)
        operand = GroupOperand(values)
        label = " ".join(filter(None, ("sparse", f"in {mine.sparse_dim()} dimensions", operand.moved_as)))
        ahead = ahead_of(Collective.ALLREDUCE, operand.dtype, label, tuple(tensor.shape), int(how.op))
        rows = self.runner.exchange([indices.shape[1]], ahead)[:, 0].tolist()
        all_values = values.new_empty((sum(rows), *values.shape[1:]))
        # Entry by entry, so that each rank's indices are contiguous.
        all_indices = indices.new_empty((sum(rows), indices.shape[0]))
        for output, own in ((all_values, values), (all_indices, indices.t().contiguous())):
            parts = self._parts(output, rows=rows)
            intent = Signature.intent(Collective.ALLREDUCE, name="sparse", text=sizes_text(parts.bounds))
            self._gather_parts(parts, GroupOperand(own), intent)
        total = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape).coalesce()
        if how.op == ReduceOp.AVERAGE:
            total = total / self.size
        with torch.no_grad():  # detaching would give the tensor separate entries
            tensor.copy_(total)

    def reduce(self, tensor: torch.Tensor, root: int, how: GroupReduction) -> None:
        """Reduce a tensor to the root, in place; the other ranks' tensors do not change."""
        operand = GroupOperand(tensor, arithmetic=True)
        data = operand.flat
        intent = Signature.intent(Collective.REDUCE, int(how.op), root, how.name, text=_count_text(data))
        if self.rank != root:
            data = self._scratch(operand.flat.size, operand.dtype)
            np.copyto(data, operand.flat)
        if data.nbytes <= _REDUCE_ALL_BYTES:
            self._reduce(data, how, intent)
        else:
            multiply(data, how.factor)
            bounds = even_bounds(data.size, self.size)
            self.runner.reduce_scatter(data, intent.on(data, bounds))
            own = data[bounds[self.rank] : bounds[self.rank + 1]]
            self._to_root(own, data if self.rank == root else None, bounds, intent)
        if self.rank == root:
            operand.finish()

    def reduce_scatter(
        self, output: torch.Tensor, source: Divided, how: GroupReduction, label: str = ""
    ) -> None:
        """Reduce the ranks' sources; rank r gets part r of the result."""
        parts = self._parts(source, arithmetic=True, copied=True)
        target = GroupOperand(output, arithmetic=True)
        own = parts.part(self.rank)
        _check_room("output", target.element, target.flat, parts.element, own)
        data = parts.load()
        multiply(data, how.factor)
        intent = _divided(Collective.REDUCESCATTER, how.labelled(label).name, parts, int(how.op))
        self.runner.reduce_scatter(data, intent.on(data))
        target.flat[...] = own
        target.finish()

    # ---- movement ----------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to all ranks."""
        operand = GroupOperand(tensor)
        flat = operand.flat
        call = direct_call(Collective.BROADCAST, flat, operand.moved_as, flat.shape, root=root)
        self.runner.broadcast(flat, call)
        if self.rank != root:
            operand.finish()

    def all_gather(self, output: Divided, source: torch.Tensor, label: str = "") -> None:
        """Copy every rank's tensor to all ranks: rank r's to part r of ``output``; sizes may differ."""
        parts, own = self._parts(output), GroupOperand(source)
        name = f"{own.moved_as} {label}".strip()
        self._gather_parts(parts, own, _divided(Collective.ALLGATHER, name, parts))

    def _gather_parts(self, parts: Parts, own: GroupOperand, intent: Signature) -> None:
        place = parts.part(self.rank)
        _check_room("input", own.element, own.flat, parts.element, place)
        place[...] = own.flat
        self.runner.all_gather(parts.array, intent.on(parts.array, parts.bounds))
        parts.finish()

    def gather(self, outputs: Tensors, source: torch.Tensor, root: int) -> None:
        """Copy rank r's tensor to ``outputs[r]`` on the root; the other ranks have no outputs."""
        own = GroupOperand(source)
        parts = self._parts(outputs) if self.rank == root else None
        text = _count_text(own.flat) if parts is None else sizes_text(parts.bounds)
        intent = Signature.intent(Collective.GATHER, NO_OP, root, own.moved_as, text=text)
        if parts is None:
            self._to_root(own.flat, None, (), intent)
        else:
            _check_room("input", own.element, own.flat, parts.element, parts.part(root))
            self._to_root(own.flat, parts.array, parts.bounds, intent)
            parts.finish()

    def _to_root(self, own: Array, data: Any, bounds: Tuple[int, ...], intent: Signature) -> None:
        """Send this rank's part to the root, which receives all parts in ``data``."""
        send = _only(intent.root, own.size, self.size)
        if data is None:
            data, bounds = np.empty(0, own.dtype), (0,) * (self.size + 1)
        self.runner.all_to_all(own, data, send, bounds, intent.on(data, items=0))

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int) -> None:
        """Send the root's ``inputs[r]`` to rank r; the other ranks have no inputs."""
        target = GroupOperand(output)
        source, send = np.empty(0, target.dtype), (0,) * (self.size + 1)
        text = _count_text(target.flat)
        if self.rank == root:
            parts = self._parts(inputs)
            _check_room("output", target.element, target.flat, parts.element, parts.part(root))
            source, send, text = parts.load(), parts.bounds, sizes_text(parts.bounds)
        into = _only(root, target.flat.size, self.size)
        intent = Signature.intent(Collective.SCATTER, NO_OP, root, target.moved_as, text=text)
        self.runner.all_to_all(source, target.flat, send, into, intent.on(target.flat, items=0))
        target.finish()

    def all_to_all(
        self, output: Divided, source: Divided, into: Sequence[int] = (), send: Sequence[int] = ()
    ) -> None:
        """Send part r of ``source`` to rank r, and receive its part; ``into`` and ``send`` are rows."""
        sent, received = self._parts(source, rows=send), self._parts(output, rows=into, index=1)
        to, come = sent.bounds, received.bounds
        place, own = received.part(self.rank), sent.part(self.rank)
        _check_room("output", received.element, place, sent.element, own)
        text = f"sending {sizes_text(to)}, receiving {sizes_text(come)}"
        intent = Signature.intent(Collective.ALLTOALL, name=sent.operands[0].moved_as, text=text)
        self.runner.all_to_all(sent.load(), received.array, to, come, intent.on(received.array, items=0))
        received.finish()

    def _parts(
        self, tensors: Divided, arithmetic: bool = False, copied: bool = False, rows: Sequence[int] = (),
        index: int = 0,
    ) -> Parts:  # fmt: skip
        """Return one part for each rank: equal parts (or ``rows``) of a tensor, or one of as many tensors;
        several tensors, and with ``copied`` one, are copied to the scratch memory ``index``.
        """
        if not isinstance(tensors, torch.Tensor):
            if len(tensors) != self.size:
                raise Misuse(f"one tensor per rank is needed: {self.size}, not {len(tensors)}.")
            if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
                raise Misuse("the tensors of one collective must be of one type.")
            operands = [GroupOperand(tensor, arithmetic) for tensor in tensors]
            return self._copied(operands, cumulative(tensor.numel() for tensor in tensors), index)
        operand = GroupOperand(tensors, arithmetic)
        bounds = _parts_of(tensors, rows, self.size)
        return self._copied([operand], bounds, index) if copied else Parts([operand], bounds)

    def _copied(self, operands: List[GroupOperand], bounds: Tuple[int, ...], index: int = 0) -> Parts:
        return Parts(operands, bounds, self._scratch(bounds[-1], operands[0].dtype, index))


def _divided(kind: Collective, name: str, parts: Parts, op: int = NO_OP) -> Signature:
    """Return the request of a collective on parts, whose sizes all ranks must agree on."""
    return Signature.intent(kind, op, NO_ROOT, name, parts.bounds, sizes_text(parts.bounds))


def _count_text(data: Array) -> str:
    return f"{data.size} elements"


def _only(place: int, count: int, size: int) -> Tuple[int, ...]:
    """Return the boundaries of chunks of which only one is not empty."""
    return (0,) * (place + 1) + (count,) * (size - place)


def _check_room(what: str, dtype: torch.dtype, array: Array, needed: torch.dtype, part: Array) -> None:
    if array.size != part.size or dtype != needed:
        raise Misuse(
            f"the {what} tensor has {array.size} elements of {dtype}; {part.size} of {needed} are needed."
        )


# ---- tensors of devices ------------------------------------------------------------------------------------


class _Shadow:
    """A tensor in host memory in place of one on a device, which the operation reads, writes or both."""

    def __init__(
        self, pool: StagingPool, kind: DeviceKind, tensor: torch.Tensor, reads: bool, writes: bool
    ) -> None:
        if tensor.layout is not torch.strided:
            raise Misuse(f"The backend 'ringcomm' supports dense tensors on devices, not {tensor.layout}.")
        self.reads, self.writes = reads, writes
        self._tensor = tensor.detach()
        self._operand = DeviceOperand(pool, kind, _movable(self._tensor), "the operation")
        self.mirror = self._operand.mirror
        self.host = torch.from_numpy(self._operand.flat).view(tensor.dtype).view(tensor.shape)
        if reads:
            self.mirror.preload()

    def publish(self) -> None:
        """Let the current stream wait for the result, and copy it to a tensor of another layout."""
        self._operand.finish()
        own, moved = self._tensor, self._operand.on_device
        if own.is_cuda and moved.data_ptr() != own.data_ptr():  # pragma: no cover - needs a CUDA device
            for used in (own, moved):
                used.record_stream(torch.cuda.current_stream(own.device))


class Staged:
    """The tensors of one operation on a device; ``arguments`` becomes the same with host memory. The calling
    thread makes it, so that copies come after the queue of its current stream. ``in_place``: the operation
    also reads the ``written`` tensors.
    """

    def __init__(self, pool: StagingPool, arguments: Sequence[Any], written: Tensors, in_place: bool) -> None:
        self._pool = pool
        self._in_place = in_place
        self._written = {id(tensor) for tensor in written}
        self._shadows: Dict[int, _Shadow] = {}
        self._arrived: Optional[Any] = None
        self._cuda: Optional[torch.device] = None
        self.arguments: Tuple[Any, ...] = tuple(self._on_host(item) for item in arguments)

    def _on_host(self, item: Any) -> Any:
        if isinstance(item, (list, tuple)) and not hasattr(item, "_fields"):
            return type(item)(self._on_host(part) for part in item)
        if not isinstance(item, torch.Tensor):
            return item
        kind, key = device_kind(item), id(item)
        if kind is None:
            raise Misuse("The tensors of one operation must be on one device; this one has some on the CPU.")
        if key not in self._shadows:
            writes = key in self._written
            self._shadows[key] = _Shadow(self._pool, kind, item, self._in_place or not writes, writes)
            self._cuda = item.device if item.device.type == "cuda" else None
        return self._shadows[key].host

    def run(self, do: Callable[..., None], runner: Runner) -> None:
        """Run the operation between the loads and the stores, in the thread that runs operations."""
        for shadow in self._shadows.values():
            if shadow.reads:
                runner.fetch(shadow.mirror)
        do(*self.arguments)
        self.deliver()

    def fetched(self, wait: Wait) -> Any:
        """Wait for the load of the first argument, the only tensor; return it."""
        for shadow in self._shadows.values():
            shadow.mirror.fetch(wait)
        return self.arguments[0]

    def deliver(self) -> None:
        """Start the stores of the written tensors."""
        with self.stream():
            for shadow in self._shadows.values():
                if shadow.writes:
                    shadow.mirror.store_all()
                    shadow.publish()
                else:
                    shadow.mirror.release()
            if self._cuda is not None:
                self._arrived = torch.cuda.Event()
                self._arrived.record()
        self.arguments = ()
        self._shadows = {}

    def stream(self) -> Any:
        """Return a stream for the stores: the program's streams do not wait until they ask for the result."""
        if self._cuda is None:
            return nullcontext()
        if self._cuda not in _streams:
            _streams[self._cuda] = torch.cuda.Stream(device=self._cuda)
        return torch.cuda.stream(_streams[self._cuda])

    def follow(self) -> None:
        if self._arrived is not None:
            torch.cuda.current_stream(self._cuda).wait_event(self._arrived)

    def future(self) -> Any:
        """Return a future whose waiting threads' streams wait for the result."""
        return torch.futures.Future() if self._cuda is None else torch.futures.Future(devices=[self._cuda])


_streams: Dict[torch.device, Any] = {}


def tensors_in(value: Any) -> List[torch.Tensor]:
    """Return all tensors in (nested) lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def staged(pool: StagingPool, arguments: Sequence[Any], result: Any, in_place: bool) -> Optional[Staged]:
    """Return the tensors of an operation on a device; None if they are on the CPU."""
    first = arguments[0] if arguments else None
    if not isinstance(first, torch.Tensor):
        tensors = tensors_in(arguments)
        if not tensors:
            return None
        first = tensors[0]
    if device_kind(first) is None:
        return None
    return Staged(pool, arguments, tensors_in(result), in_place)
