"""Synchronous collectives over arrays of all kinds, matched between ranks by the order of the calls.

This module makes operands of arrays (:mod:`ringcomm.arrays.operands`) and bytes of objects;
:mod:`ringcomm.collective` moves the flat arrays. With arrays on devices the calling thread waits until
everything has been sent and received and the last copies to the device have been started. It does not wait
for these: its current stream on the device does.
"""

from __future__ import annotations

from math import prod
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from ..arrays.kinds import StagingPool
from ..arrays.operands import HostOperand, Operand, operand_of
from ..collective.observe import note_truncation
from ..collective.options import DIRECT_ORDER, Options, takes
from ..collective.reduce import restore
from ..collective.rows import (
    announced,
    announcement,
    check_rows,
    cumulative,
    even_layout,
    joined_rows,
    row_counts,
    scatter_layout,
)
from ..collective.runner import Runner
from ..docstrings import documented
from ..dtypes import Array, joined_shape, type_names
from ..engine.bucket_runner import adasum, check_adasum
from ..errors import MismatchError, Misuse
from ..ops import Collective, ReduceOp, codec_number, factor_of, name_of, root_of
from ..wire.frames import NO_ROOT
from ..wire.signature import Signature, ahead_of, direct_call
from .objects import NOTHING, Objects


class Collectives:
    """The synchronous collectives of one rank. All ranks must make the same calls in the same order.

    Several threads may call them; the calls run one after another.

    Args:
        runner: moves flat arrays.
        rank: this rank.
        size: the number of ranks.
        objects: packs and unpacks Python objects.
    """

    def __init__(self, runner: Runner, rank: int, size: int, objects: Objects) -> None:
        self.objects = objects
        self.rank = rank
        self.size = size
        self._staging = StagingPool()
        self._runner = runner

    # ---- reductions --------------------------------------------------------------------------

    @takes("allreduce", DIRECT_ORDER, "direct", without="process_set")
    def allreduce(self, array: Any, options: Options) -> Array:
        """Reduce an array of the same shape and dtype over all ranks; every rank gets the result.

        {allreduce}
        """
        return self.reduced(array, "", options)

    @takes("allreduce", DIRECT_ORDER, "direct", without="process_set")
    def allreduce_(self, array: Array, options: Options) -> Array:
        """Reduce an array over all ranks in place: the result overwrites ``array`` on every rank.

        {allreduce_}
        """
        return self.reduced(array, "allreduce_", options)

    def reduced(self, array: Any, in_place: str, options: Options) -> Array:
        """Run an allreduce; ``in_place`` is the function's name if the array is overwritten, else ""."""
        operand = operand_of(self._staging, array, in_place)
        op, runner, flat, mirror = options.op, self._runner, operand.flat, operand.mirror
        call = _call(Collective.ALLREDUCE, flat, operand.shape, options)
        if options.weight is None and op != ReduceOp.ADASUM:
            if self.rank == 0 and flat.dtype.kind in "iu":
                note_truncation(op, flat.dtype)
            if mirror is None:
                runner.all_reduce(flat, call)
            else:
                with runner.loaded(mirror, None, (0, flat.size)):
                    runner.all_reduce(flat, call)
            return operand.finish()
        if op == ReduceOp.ADASUM:
            check_adasum(operand.dtype)
        with runner.loaded(mirror, None, (0, flat.size)), runner.exclusive():
            if options.weight is None:
                adasum(runner, flat, call.prescale, call.postscale)
            else:
                weighted = runner.weighted(flat, options.weight, call)
                runner.all_reduce(weighted, call._replace(dtypes=type_names(weighted.dtype)))
                restore(flat, weighted)
        return operand.finish()

    @takes("reducescatter", texts="direct", without="process_set")
    def reducescatter(self, array: Any, options: Options) -> Array:
        """Reduce an array over all ranks; every rank gets only its rows of the result.

        {reducescatter}
        """
        return self.reduced_rows(array, "", options)

    @takes("reducescatter", texts="direct", without="process_set")
    def reducescatter_(self, array: Array, options: Options) -> Array:
        """Reduce an array over all ranks, using it as working space; every rank gets only its rows.

        {reducescatter_}
        """
        return self.reduced_rows(array, "reducescatter_", options)

    def reduced_rows(self, array: Any, in_place: str, options: Options) -> Array:
        """Run a reducescatter; ``in_place`` is the function's name if the array is working space, else ""."""
        runner, operand = self._runner, operand_of(self._staging, array, in_place)
        shape = operand.shape
        layout = scatter_layout((shape,), self.size, options)
        if self.rank == 0:
            note_truncation(options.op, operand.dtype)
        first, last = layout.edges[0][self.rank : self.rank + 2]
        operand.narrow(first, last)
        flat, bounds = operand.flat, layout.bounds
        call = _call(Collective.REDUCESCATTER, flat, shape, options, bounds)
        # Of codecs there are all-reduces only.
        reduce = runner.all_reduce if call.codec else runner.reduce_scatter
        with runner.loaded(operand.mirror, None, (bounds[self.rank], bounds[self.rank + 1])):
            if options.weight is None:
                reduce(flat, call)
            else:
                with runner.exclusive():
                    weighted = runner.weighted(flat, options.weight, call)
                    reduce(weighted, call._replace(dtypes=type_names(weighted.dtype)))
                    restore(flat, weighted)
        return operand.finish_rows(first, last)

    # ---- movement ----------------------------------------------------------------------------

    @documented
    def allgather(self, array: Any, name: Optional[str] = None) -> Array:
        """Concatenate every rank's array along the first dimension, in rank order.

        {allgather}
        """
        source = operand_of(self._staging, array, rows=True)
        shape = source.shape or (1,)
        width, inner = prod(shape[1:]), shape[1:]
        runner, label = self._runner, name_of(name)
        with runner.exclusive(parts=2):
            own = announcement([shape[0]], source.flat if source.mirror is None else None)
            table = runner.exchange(own, ahead_of(Collective.ALLGATHER, source.dtype, label, inner))
            counts, enclosed = announced(table)
            rows = [count for (count,) in counts]
            joined = joined_shape(rows, inner)
            if enclosed is not None:
                runner.complete()
                return joined_rows(enclosed, source.dtype).reshape(joined)
            bounds = cumulative(rows, width)
            output = source.output(bounds[-1], bounds[self.rank], (0, shape[0] * width))
            self._all_gather(output, bounds, label, inner)
        return output.finish(joined)

    @documented
    def allgather_(self, array: Array, name: Optional[str] = None) -> Array:
        """Complete an array of which every rank has only its rows: the inverse of ``reducescatter_``.

        Each rank contributes the rows that ``reducescatter`` would give it. The other rows are overwritten.

        {allgather_}
        """
        operand = operand_of(self._staging, array, "allgather_")
        shape = operand.shape
        check_rows("allgather_", (shape,))
        bounds = even_layout((shape,), self.size).bounds
        self._all_gather(operand, bounds, name_of(name), shape)
        return operand.finish()

    def _all_gather(
        self, operand: Operand, bounds: Tuple[int, ...], name: str, shape: Tuple[int, ...]
    ) -> None:
        own = (bounds[self.rank], bounds[self.rank + 1])
        with self._runner.loaded(operand.mirror, own, (0, bounds[-1])):
            call = direct_call(Collective.ALLGATHER, operand.flat, name, shape, bounds=bounds)
            self._runner.all_gather(operand.flat, call)

    @documented
    def broadcast(self, array: Any, root_rank: int = 0, name: Optional[str] = None) -> Array:
        """Copy the root's array to every rank.

        {broadcast}
        """
        return self._broadcast(operand_of(self._staging, array), root_rank, name)

    @documented
    def broadcast_(self, array: Array, root_rank: int = 0, name: Optional[str] = None) -> Array:
        """Overwrite ``array`` on every rank with the root's array.

        {broadcast_}
        """
        return self._broadcast(operand_of(self._staging, array, "broadcast_"), root_rank, name)

    def _broadcast(self, operand: Operand, root_rank: int, name: Optional[str]) -> Array:
        root, mirror, flat = self._root(root_rank), operand.mirror, operand.flat
        nothing, everything = (0, 0), (0, flat.size)
        sent, received = nothing, everything
        if root == self.rank:
            operand.send_only()
            sent, received = everything, nothing
        with self._runner.loaded(mirror, sent, received):
            call = direct_call(Collective.BROADCAST, flat, name_of(name), operand.shape, root=root)
            self._runner.broadcast(flat, call)
        return operand.finish()

    @documented
    def alltoall(self, array: Any, splits: Optional[Sequence[int]] = None, name: Optional[str] = None) -> Any:
        """Send rows to every rank, and receive rows from every rank.

        {alltoall}
        """
        source = operand_of(self._staging, array, rows=True)
        output, shape, received = self._exchange_rows(source, splits, name)
        result = output.finish(shape)
        return result if splits is None else (result, np.array(received, np.int32))

    @documented
    def alltoall_(self, array: Array, name: Optional[str] = None) -> Array:
        """Exchange rows with every rank in place; every rank gets equally many rows.

        {alltoall_}
        """
        operand = operand_of(self._staging, array, "alltoall_")
        output, _, _ = self._exchange_rows(operand_of(self._staging, array, rows=True), None, name, True)
        return operand.overwrite(output)

    def _exchange_rows(
        self, source: Operand, splits: Optional[Sequence[int]], name: Optional[str], in_place: bool = False
    ) -> Tuple[Operand, Tuple[int, ...], List[int]]:
        """Return the received rows, their shape, and their number per rank; ``in_place`` reuses the array."""
        shape, rank = source.shape, self.rank
        check_rows("alltoall", (shape,))
        counts = row_counts(shape[0], splits, self.size)
        width, inner = prod(shape[1:]), shape[1:]
        runner, label = self._runner, name_of(name)
        with runner.exclusive(parts=2):
            own = announcement(counts, source.flat if source.mirror is None else None)
            table = runner.exchange(own, ahead_of(Collective.ALLTOALL, source.dtype, label, inner))
            rows, enclosed = announced(table)
            if in_place and any(numbers != rows[0] for numbers in rows):
                lengths = ", ".join(str(sum(numbers)) for numbers in rows)
                raise MismatchError(f"alltoall_: the ranks' arrays have {lengths} rows; all need as many.")
            received = [numbers[rank] for numbers in rows]
            joined = joined_shape(received, inner)
            if enclosed is not None:
                runner.complete()
                row_bytes = width * source.dtype.itemsize
                edges = [(sum(numbers[:rank]), sum(numbers[: rank + 1])) for numbers in rows]
                ours = [part[i * row_bytes : j * row_bytes] for part, (i, j) in zip(enclosed, edges)]
                return HostOperand(joined_rows(ours, source.dtype), joined), joined, received
            send, into = cumulative(counts, width), cumulative(received, width)
            output = source.output(into[-1], into[rank], send[rank : rank + 2])
            before, after = (0, into[rank]), (into[rank + 1], into[-1])
            with runner.loaded(source.mirror), runner.loaded(output.mirror, (0, 0), before, after):
                call = direct_call(Collective.ALLTOALL, output.flat, label, inner, items=0)
                runner.all_to_all(source.flat, output.flat, send, into, call, has_own=True)
        return output, joined, received

    # ---- coordination ------------------------------------------------------------------------

    @documented
    def barrier(self, name: Optional[str] = None) -> None:
        """Wait until every rank has called this.

        {barrier}
        """
        self._runner.barrier(name_of(name))

    @documented
    def broadcast_object(self, value: Any = None, root_rank: int = 0, name: Optional[str] = None) -> Any:
        """Send any object (pickled by cloudpickle) from the root to all ranks.

        {broadcast_object}
        """
        root, label, kind = self._root(root_rank), name_of(name), Collective.BROADCAST_OBJECT
        with self._runner.exclusive(parts=2):
            is_root = self.rank == root
            packed = self.objects.pack(value, "broadcast_object", label) if is_root else NOTHING
            length = np.array([len(packed.data)], np.int64)
            self._runner.broadcast(length, direct_call(kind, length, label, (1,), root=root))
            data = np.frombuffer(packed.data, np.uint8) if is_root else np.empty(int(length[0]), np.uint8)
            self._runner.broadcast(data, direct_call(kind, data, label, data.shape, root=root))
            if is_root:
                packed.raise_error()
                return value
            # In the order of the calls, whichever thread made them; unpickling may make calls.
            pickled = self.objects.verified(data, root, "broadcast_object", label)
        return self.objects.load(pickled)

    @documented
    def allgather_object(self, value: Any, name: Optional[str] = None) -> List[Any]:
        """Collect any object (pickled by cloudpickle) from every rank.

        {allgather_object}
        """
        label, kind = name_of(name), Collective.ALLGATHER_OBJECT
        with self._runner.exclusive(parts=2):
            packed = self.objects.pack(value, "allgather_object", label)
            payload = np.frombuffer(packed.data, np.uint8)
            lengths = self._runner.exchange([payload.size], ahead_of(kind, payload.dtype, label))
            bounds = cumulative(lengths[:, 0])
            gathered = np.empty(bounds[-1], np.uint8)
            gathered[bounds[self.rank] : bounds[self.rank + 1]] = payload
            self._runner.all_gather(gathered, direct_call(kind, gathered, label, bounds=bounds))
            pickled = {
                rank: self.objects.verified(
                    gathered[bounds[rank] : bounds[rank + 1]], rank, "allgather_object", label
                )
                for rank in range(self.size)
                if rank != self.rank
            }
        packed.raise_error()
        return [value if rank == self.rank else self.objects.load(pickled[rank]) for rank in range(self.size)]

    def _root(self, root_rank: int) -> int:
        root = root_of(root_rank)
        if not 0 <= root < self.size:
            raise Misuse(f"root_rank={root_rank}: this job has ranks 0 to {self.size - 1}.")
        return root


def _call(
    kind: Collective, flat: Array, shape: Tuple[int, ...], options: Options, bounds: Tuple[int, ...] = ()
) -> Signature:
    """Return the signature of a reduction, with checked options."""
    name, prescale, postscale = options.name, options.prescale_factor, options.postscale_factor
    return Signature(
        "" if name is None else name_of(name), 0, int(kind), int(options.op), NO_ROOT,
        type_names(flat.dtype), (shape,),
        1.0 if prescale == 1.0 else factor_of(prescale),
        1.0 if postscale == 1.0 else factor_of(postscale),
        0 if options.compression is None else codec_number(options.compression),
        bounds=bounds, items=flat.size,
    )  # fmt: skip
