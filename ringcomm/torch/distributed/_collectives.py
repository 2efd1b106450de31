"""PyTorch's collectives on tensors, executed over a group's links. All functions block."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple, TypeVar

import numpy as np
import torch

from ...collective.calls import Intent, sizes_text
from ...collective.runner import Runner
from ...collective.staged import Staging
from ...dtypes import Array
from ...errors import Misuse
from ...ops import Collective, ReduceOp
from ...schedule.steps import even_bounds
from ...wire.frames import NO_OP, NO_ROOT
from ._bridge import Flat, even_parts, flat_array
from ._reductions import Reduction

Tensors = Sequence[torch.Tensor]
_Item = TypeVar("_Item")

_KEPT_BYTES = 64 * 1024 * 1024
"""Scratch memory up to this size is kept for the next operation."""
_FUSE_BYTES = 256 * 1024
"""Of several tensors to be reduced at once, those up to this size are fused."""
_REDUCE_ALL_BYTES = 64 * 1024
"""Up to this size a reduce runs as an all-reduce: fewer rounds matter more than fewer bytes."""


class Collectives:
    """The operations of one group, for one thread at a time.

    Args:
        runner: runs collectives on flat arrays.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.rank = runner.rank
        self.size = runner.size
        self._space: List[Array] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def _scratch(self, count: int, dtype: np.dtype[Any], index: int = 0) -> Array:
        """Scratch memory, valid until the next operation."""
        nbytes = count * dtype.itemsize
        space = self._space[index]
        if space.size < nbytes:
            space = np.empty(nbytes, np.uint8)
            if nbytes <= _KEPT_BYTES:
                self._space[index] = space
        return space[:nbytes].view(dtype)

    # ---- reductions --------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, how: Reduction) -> None:
        """Reduce a tensor over all ranks, in place."""
        if tensor.is_sparse:
            self._all_reduce_sparse(tensor, how)
            return
        flat = Flat(tensor, arithmetic=True)
        self._reduce(flat.array, how)
        flat.finish()

    def all_reduce_staged(self, tensor: torch.Tensor, how: Reduction, staging: Staging) -> bool:
        """Reduce a tensor of a device while it is copied; whether this kind of reduction can be run so."""
        if how.op is None or how.factor != 1.0:
            return False
        data = flat_array(tensor, arithmetic=True)
        self.runner.all_reduce(data, how.op, how.name, data.shape, staging=staging)
        return True

    def broadcast_staged(self, tensor: torch.Tensor, root: int, staging: Staging) -> bool:
        """Copy the root's tensor to all ranks while it is copied between devices and hosts."""
        flat = Flat(tensor)
        self.runner.broadcast(flat.array, root, flat.moved_as, flat.array.shape, staging=staging)
        return True

    def _reduce(self, data: Array, how: Reduction, intent: Optional[Intent] = None) -> None:
        how.check(data.dtype)
        how.prepare(data)
        if how.op is not None:
            self.runner.all_reduce(data, how.op, how.name, data.shape, intent=intent)
            return
        intent = intent or Intent(Collective.ALLREDUCE, how.code, name=how.name, text=_count_text(data))
        bounds = even_bounds(data.size, self.size)
        own = data[bounds[self.rank] : bounds[self.rank + 1]]
        own[...] = self._fold(data, bounds, how, intent)
        self.runner.all_gather(data, bounds, intent=intent)

    def _fold(self, source: Array, bounds: Tuple[int, ...], how: Reduction, intent: Intent) -> Array:
        """This rank's chunk, reduced by a function that the runner does not have."""
        assert how.ufunc is not None
        count = bounds[self.rank + 1] - bounds[self.rank]
        pieces = self._scratch(count * self.size, source.dtype, 1)
        into = tuple(count * rank for rank in range(self.size + 1))
        self.runner.all_to_all(source, pieces, bounds, into, intent=intent)
        result: Array = how.ufunc.reduce(pieces.reshape(self.size, count), axis=0)  # type: ignore[attr-defined]
        return result

    def all_reduce_all(self, tensors: Tensors, how: Reduction) -> None:
        """Reduce several tensors; small ones of one dtype are fused."""
        small = [t for t in tensors if not t.is_sparse and t.numel() * t.element_size() <= _FUSE_BYTES]
        together = len({t.dtype for t in small}) == 1 and len(small) > 1
        alone = [t for t in tensors if not together or not any(t is item for item in small)]
        if alone or not together:
            self.for_each(alone, lambda tensor, label: self.all_reduce(tensor, how.labelled(label)))
        if not together:
            return
        flats = [Flat(tensor, arithmetic=True) for tensor in small]
        bounds = _bounds_of(small)
        fused = self._scratch(bounds[-1], flats[0].array.dtype)
        np.concatenate([flat.array for flat in flats], out=fused)
        text = sizes_text(bounds)
        self._reduce(fused, how, Intent(Collective.ALLREDUCE, how.code, NO_ROOT, how.name, bounds, text))
        for flat, start, stop in zip(flats, bounds, bounds[1:]):
            flat.array[...] = fused[start:stop]
            flat.finish()

    def for_each(self, items: Sequence[_Item], act: Callable[[_Item, str], None]) -> None:
        """Call ``act`` with each of an operation's tensors and a label (its number, and the count).

        The label makes different numbers of tensors on different ranks an error.
        """
        if not items:
            self.runner.barrier("no tensors")
        for number, item in enumerate(items, start=1):
            act(item, f"tensor {number} of {len(items)}" if len(items) > 1 else "")

    def _all_reduce_sparse(self, tensor: torch.Tensor, how: Reduction) -> None:
        """Gather the entries of all ranks and add them; their number may differ."""
        if how.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise Misuse("sparse tensors can be summed and averaged only.")
        mine = tensor.coalesce()
        values, indices = mine.values(), mine.indices()
        how.prepare(flat_array(values, arithmetic=True))
        flat = Flat(values)
        label = " ".join(filter(None, ("sparse", f"in {mine.sparse_dim()} dimensions", flat.moved_as)))
        rows = self.runner.exchange(
            [indices.shape[1]], Collective.ALLREDUCE, flat.array.dtype, label, tuple(tensor.shape), how.code
        )[:, 0]
        all_values = values.new_empty((int(rows.sum()), *values.shape[1:]))
        # Entry by entry, so that each rank's indices are contiguous.
        all_indices = indices.new_empty((int(rows.sum()), indices.shape[0]))
        self._gather_rows(all_values, values, rows)
        self._gather_rows(all_indices, indices.t().contiguous(), rows)
        total = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape).coalesce()
        if how.op == ReduceOp.AVERAGE:
            total = total / self.size
        with torch.no_grad():  # detaching would give the tensor separate entries
            tensor.copy_(total)

    def _gather_rows(self, output: torch.Tensor, own: torch.Tensor, rows: Array) -> None:
        data, mine = flat_array(output), flat_array(own)
        width = data.size // output.shape[0] if output.shape[0] else 1
        bounds = (0, *(int(bound) * width for bound in np.cumsum(rows)))
        data[bounds[self.rank] : bounds[self.rank + 1]] = mine
        intent = Intent(Collective.ALLREDUCE, name="sparse", text=sizes_text(bounds))
        self.runner.all_gather(data, bounds, intent=intent)

    def reduce(self, tensor: torch.Tensor, root: int, how: Reduction) -> None:
        """Reduce a tensor to the root, in place; the other ranks' tensors do not change."""
        flat = Flat(tensor, arithmetic=True)
        data = flat.array
        intent = Intent(Collective.REDUCE, how.code, root, how.name, text=_count_text(data))
        if self.rank != root:
            data = self._scratch(flat.array.size, flat.array.dtype)
            np.copyto(data, flat.array)
        if how.op is None or data.nbytes <= _REDUCE_ALL_BYTES:
            self._reduce(data, how, intent)
        else:
            how.prepare(data)
            bounds = even_bounds(data.size, self.size)
            self.runner.reduce_scatter(data, bounds, how.op, intent=intent)
            own = data[bounds[self.rank] : bounds[self.rank + 1]]
            self._to_root(own, data if self.rank == root else None, bounds, intent)
        if self.rank == root:
            flat.finish()

    def reduce_scatter(self, output: torch.Tensor, inputs: Tensors, how: Reduction) -> None:
        """Rank r gets the reduction of all ranks' ``inputs[r]``; the inputs may differ in size."""
        bounds = _bounds_of(inputs)
        source = self._joined(inputs, bounds, arithmetic=True)
        self._reduce_scatter(output, source, bounds, how)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, how: Reduction, label: str = ""
    ) -> None:
        """Reduce one tensor; every rank gets an equal part of the result."""
        flat = flat_array(source, arithmetic=True)
        bounds = even_parts(flat.size, self.size)
        data = self._scratch(flat.size, flat.dtype)
        np.copyto(data, flat)
        self._reduce_scatter(output, data, bounds, how, label)

    def _reduce_scatter(
        self, output: torch.Tensor, data: Array, bounds: Tuple[int, ...], how: Reduction, label: str = ""
    ) -> None:
        target = Flat(output, arithmetic=True)
        _check_room(target.array, bounds[self.rank + 1] - bounds[self.rank], data.dtype, "output")
        how.check(data.dtype)
        how.prepare(data)
        name, text = how.labelled(label).name, sizes_text(bounds)
        intent = Intent(Collective.REDUCESCATTER, how.code, NO_ROOT, name, bounds, text)
        if how.op is None:
            target.array[...] = self._fold(data, bounds, how, intent)
        else:
            self.runner.reduce_scatter(data, bounds, how.op, intent=intent)
            target.array[...] = data[bounds[self.rank] : bounds[self.rank + 1]]
        target.finish()

    # ---- movement ----------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to all ranks."""
        flat = Flat(tensor)
        self.runner.broadcast(flat.array, root, flat.moved_as, flat.array.shape)
        if self.rank != root:
            flat.finish()

    def all_gather(self, outputs: Tensors, source: torch.Tensor, label: str = "") -> None:
        """Copy every rank's tensor to all ranks: rank r's to ``outputs[r]``; sizes may differ."""
        flat = Flat(source)
        own, bounds = flat.array, self._bounds(outputs, source)
        _check_room(own, bounds[self.rank + 1] - bounds[self.rank], own.dtype, "input")
        data = self._scratch(bounds[-1], own.dtype)
        data[bounds[self.rank] : bounds[self.rank + 1]] = own
        self.runner.all_gather(data, bounds, intent=_gathering(bounds, flat, label))
        self._copy_out(data, outputs, bounds)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, label: str = "") -> None:
        """Copy every rank's tensor into one tensor, without scratch memory."""
        own, target = flat_array(source), Flat(output)
        _check_room(target.array, own.size * self.size, own.dtype, "output")
        bounds = even_parts(target.array.size, self.size)
        target.array[bounds[self.rank] : bounds[self.rank + 1]] = own
        self.runner.all_gather(target.array, bounds, intent=_gathering(bounds, target, label))
        target.finish()

    def gather(self, outputs: Tensors, source: torch.Tensor, root: int) -> None:
        """Copy rank r's tensor to ``outputs[r]`` on the root; the other ranks have no outputs."""
        flat = Flat(source)
        own, bounds = flat.array, self._bounds(outputs, source) if self.rank == root else ()
        text = sizes_text(bounds) if bounds else _count_text(own)
        intent = Intent(Collective.GATHER, NO_OP, root, flat.moved_as, text=text)
        if not bounds:
            self._to_root(own, None, bounds, intent)
            return
        _check_room(own, bounds[root + 1] - bounds[root], own.dtype, "input")
        data = self._scratch(bounds[-1], own.dtype)
        self._to_root(own, data, bounds, intent)
        self._copy_out(data, outputs, bounds)

    def _to_root(self, own: Array, data: Any, bounds: Tuple[int, ...], intent: Intent) -> None:
        """Send this rank's part to the root, which receives all parts in ``data``."""
        send = _only(intent.root, own.size, self.size)
        if data is None:
            data, bounds = np.empty(0, own.dtype), (0,) * (self.size + 1)
        self.runner.all_to_all(own, data, send, bounds, intent=intent)

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int) -> None:
        """Send the root's ``inputs[r]`` to rank r; the other ranks have no inputs."""
        target = Flat(output)
        dtype = target.array.dtype
        source, send, text = np.empty(0, dtype), (0,) * (self.size + 1), _count_text(target.array)
        if self.rank == root:
            send = self._bounds(inputs, output)
            source, text = self._joined(inputs, send), sizes_text(send)
            _check_room(target.array, send[root + 1] - send[root], source.dtype, "output")
        into = _only(root, target.array.size, self.size)
        intent = Intent(Collective.SCATTER, NO_OP, root, target.moved_as, text=text)
        self.runner.all_to_all(source, target.array, send, into, intent=intent)
        target.finish()

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> None:
        """Send ``inputs[r]`` to rank r, and receive rank r's tensor in ``outputs[r]``; sizes may differ."""
        self._check_number(inputs)
        send, into = self._bounds(inputs, inputs[0]), self._bounds(outputs, inputs[0])
        source = self._joined(inputs, send)
        data = self._scratch(into[-1], source.dtype, 1)
        self.runner.all_to_all(source, data, send, into, intent=_exchanging(send, into, Flat(inputs[0])))
        self._copy_out(data, outputs, into)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, into: Sequence[int], send: Sequence[int]
    ) -> None:
        """Exchange parts of one tensor: rows by the given counts, or equal parts."""
        target, own = Flat(output), flat_array(source)
        to, come = self._row_bounds(source, send), self._row_bounds(output, into)
        own_count = to[self.rank + 1] - to[self.rank]
        _check_room(target.array[come[self.rank] : come[self.rank + 1]], own_count, own.dtype, "output")
        self.runner.all_to_all(own, target.array, to, come, intent=_exchanging(to, come, target))
        target.finish()

    def _row_bounds(self, tensor: torch.Tensor, rows: Sequence[int]) -> Tuple[int, ...]:
        if not rows:
            return even_parts(tensor.numel(), self.size)
        if len(rows) != self.size or sum(rows) != tensor.shape[0] or min(rows) < 0:
            raise Misuse(
                f"all_to_all: the split sizes {list(rows)} must be {self.size} numbers that add up to the "
                f"tensor's {tensor.shape[0]} rows."
            )
        width = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
        return (0, *(int(bound) * width for bound in np.cumsum(rows)))

    def _bounds(self, tensors: Tensors, like: torch.Tensor) -> Tuple[int, ...]:
        """The offsets of the ranks' tensors in a concatenation."""
        self._check_number(tensors)
        _check_types(tensors, like)
        return _bounds_of(tensors)

    def _joined(self, tensors: Tensors, bounds: Tuple[int, ...], arithmetic: bool = False) -> Array:
        """Several tensors concatenated in scratch memory."""
        self._check_number(tensors)
        _check_types(tensors, tensors[0])
        pieces = [flat_array(tensor, arithmetic) for tensor in tensors]
        joined = self._scratch(bounds[-1], pieces[0].dtype)
        return np.concatenate(pieces, out=joined)

    def _copy_out(self, data: Array, outputs: Tensors, bounds: Tuple[int, ...]) -> None:
        self._check_number(outputs)
        for tensor, start, stop in zip(outputs, bounds, bounds[1:]):
            target = Flat(tensor)
            _check_room(target.array, stop - start, data.dtype, "output")
            target.array[...] = data[start:stop]
            target.finish()

    def _check_number(self, tensors: Tensors) -> None:
        if len(tensors) != self.size:
            raise Misuse(f"one tensor per rank is needed: {self.size}, not {len(tensors)}.")


def _bounds_of(tensors: Tensors) -> Tuple[int, ...]:
    """The offsets of tensors in a concatenation."""
    bounds = [0]
    for tensor in tensors:
        bounds.append(bounds[-1] + tensor.numel())
    return tuple(bounds)


def _check_types(tensors: Tensors, like: torch.Tensor) -> None:
    if any(tensor.dtype != like.dtype for tensor in tensors):
        raise Misuse("the tensors of one collective must be of one type.")


def _gathering(bounds: Tuple[int, ...], flat: Flat, label: str) -> Intent:
    name = f"{flat.moved_as} {label}".strip()
    return Intent(Collective.ALLGATHER, NO_OP, NO_ROOT, name, bounds, sizes_text(bounds))


def _exchanging(send: Tuple[int, ...], into: Tuple[int, ...], flat: Flat) -> Intent:
    text = f"sending {sizes_text(send)}, receiving {sizes_text(into)}"
    return Intent(Collective.ALLTOALL, name=flat.moved_as, text=text)


def _count_text(data: Array) -> str:
    return f"{data.size} elements"


def _only(place: int, count: int, size: int) -> Tuple[int, ...]:
    """Boundaries of chunks of which only one is not empty."""
    return (0,) * (place + 1) + (count,) * (size - place)


def _check_room(array: Array, count: int, dtype: np.dtype[Any], what: str) -> None:
    if array.size != count or array.dtype != dtype:
        raise Misuse(
            f"the {what} tensor has {array.size} elements of {array.dtype}; {count} of {dtype} are needed."
        )
