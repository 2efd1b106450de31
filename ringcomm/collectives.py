"""Synchronous collectives over NumPy arrays, matched between ranks by the order of the calls.

This module handles shapes, memory layouts, rows per rank and objects as bytes; :mod:`ringcomm.collective`
moves the flat arrays.
"""

from __future__ import annotations

import operator
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
from numpy import ndarray

from .arrays.bridge import InPlace, flat_copy, flat_view
from .arrays.kinds import device_kind
from .arrays.rows import check_splits, cumulative, row_items
from .collective.call_sites import note_truncation
from .collective.runner import Runner
from .collective.weighted import apply_weight
from .device_collectives import DeviceCollectives
from .docstrings import documented
from .dtypes import Array, joined_shape
from .engine.adasum import adasum, check_adasum
from .errors import Misuse
from .objects import NOTHING, Objects
from .ops import Collective, ReduceOp, codec_number, factor_of, name_of, op_of
from .schedule.steps import even_bounds


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
        self._runner = runner
        self._devices = DeviceCollectives(runner)

    # ---- reductions --------------------------------------------------------------------------

    @documented
    def allreduce(
        self,
        array: Any,
        op: ReduceOp = ReduceOp.AVERAGE,
        name: Optional[str] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: Any = None,
        weight: Optional[float] = None,
    ) -> Array:
        """Reduce an array of the same shape and dtype over all ranks; every rank gets the result.

        {allreduce}
        """
        kind = None if type(array) is ndarray else device_kind(array)
        if kind is not None:
            made: Array = self._devices.allreduce(
                kind, array, "", op, name, prescale_factor, postscale_factor, compression, weight,
                self._all_reduce,
            )  # fmt: skip
            return made
        flat, shape = flat_copy(array)
        self._all_reduce(flat, shape, op, name, prescale_factor, postscale_factor, compression, weight)
        return flat.reshape(shape)

    @documented
    def allreduce_(
        self,
        array: Array,
        op: ReduceOp = ReduceOp.AVERAGE,
        name: Optional[str] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: Any = None,
        weight: Optional[float] = None,
    ) -> Array:
        """Reduce an array over all ranks in place: the result overwrites ``array`` on every rank.

        {allreduce_}
        """
        kind = None if type(array) is ndarray else device_kind(array)
        if kind is not None:
            made: Array = self._devices.allreduce(
                kind, array, "allreduce_", op, name, prescale_factor, postscale_factor, compression, weight,
                self._all_reduce,
            )  # fmt: skip
            return made
        target = InPlace(array, "allreduce_")
        self._all_reduce(
            target.flat, target.shape, op, name, prescale_factor, postscale_factor, compression, weight
        )
        return target.finish()

    def _all_reduce(
        self,
        flat: Array,
        shape: Tuple[int, ...],
        op: ReduceOp,
        name: Optional[str],
        prescale: float,
        postscale: float,
        compression: Any,
        weight: Optional[float],
    ) -> None:
        op, prescale, postscale = op_of(op), factor_of(prescale), factor_of(postscale)
        if weight is not None:
            with self._runner.exclusive():
                apply_weight(self._runner, flat, weight, op, name_of(name), shape)
                self._all_reduce(flat, shape, op, name, prescale, postscale, compression, None)
        elif op == ReduceOp.ADASUM:
            check_adasum(flat.dtype)
            with self._runner.exclusive():
                adasum(self._runner, flat, prescale, postscale)
        else:
            codec = codec_number(compression)
            if self.rank == 0:
                note_truncation(op, flat.dtype)
            self._runner.all_reduce(flat, op, name_of(name), shape, prescale, postscale, codec=codec)

    @documented
    def reducescatter(
        self,
        array: Any,
        op: ReduceOp = ReduceOp.AVERAGE,
        name: Optional[str] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Array:
        """Reduce an array over all ranks; every rank gets only its rows of the result.

        {reducescatter}
        """
        kind = None if type(array) is ndarray else device_kind(array)
        if kind is not None:
            made: Array = self._devices.reducescatter(
                kind, array, "", op, name, prescale_factor, postscale_factor
            )
            return made
        flat, shape = flat_copy(array)
        mine = self._reduce_scatter(flat, shape, op, name, prescale_factor, postscale_factor)
        # A copy, so that a small result does not keep the whole input's memory alive.
        return np.array(mine)

    @documented
    def reducescatter_(
        self,
        array: Array,
        op: ReduceOp = ReduceOp.AVERAGE,
        name: Optional[str] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Array:
        """Reduce an array over all ranks with ``array`` as working space; every rank gets only its rows.

        {reducescatter_}
        """
        kind = None if type(array) is ndarray else device_kind(array)
        if kind is not None:
            made: Array = self._devices.reducescatter(
                kind, array, "reducescatter_", op, name, prescale_factor, postscale_factor
            )
            return made
        target = InPlace(array, "reducescatter_")
        self._reduce_scatter(target.flat, target.shape, op, name, prescale_factor, postscale_factor)
        rows = even_bounds(target.shape[0], self.size)
        own: Array = target.finish()[rows[self.rank] : rows[self.rank + 1]]
        return own

    def _reduce_scatter(
        self,
        flat: Array,
        shape: Tuple[int, ...],
        op: ReduceOp,
        name: Optional[str],
        prescale: float,
        postscale: float,
    ) -> Array:
        width = row_items(shape, "reducescatter")
        rows = even_bounds(shape[0], self.size)
        bounds = tuple(row * width for row in rows)
        if self.rank == 0:
            note_truncation(op_of(op), flat.dtype)
        self._runner.reduce_scatter(
            flat, bounds, op_of(op), name_of(name), shape, factor_of(prescale), factor_of(postscale)
        )
        mine = flat[bounds[self.rank] : bounds[self.rank + 1]]
        return mine.reshape((rows[self.rank + 1] - rows[self.rank], *shape[1:]))

    # ---- movement ----------------------------------------------------------------------------

    @documented
    def allgather(self, array: Any, name: Optional[str] = None) -> Array:
        """Concatenate every rank's array along the first dimension, in rank order.

        {allgather}
        """
        kind = None if type(array) is ndarray else device_kind(array)
        if kind is not None:
            made: Array = self._devices.allgather(kind, array, name)
            return made
        flat, shape = flat_view(array)
        shape = shape or (1,)
        width = row_items(shape, "allgather")
        runner, label = self._runner, name_of(name)
        with runner.exclusive(parts=2):
            rows = runner.exchange([shape[0]], Collective.ALLGATHER, flat.dtype, label, shape[1:])[:, 0]
            bounds = cumulative(rows, width)
            gathered = np.empty(bounds[-1], flat.dtype)
            gathered[bounds[self.rank] : bounds[self.rank + 1]] = flat
            runner.all_gather(gathered, bounds, label, shape[1:])
        return gathered.reshape(joined_shape(rows, shape[1:]))

    @documented
    def allgather_(self, array: Array, name: Optional[str] = None) -> Array:
        """Complete an array of which every rank holds its rows: the inverse of ``reducescatter_``.

        Each rank contributes the rows that ``reducescatter`` would give it; the other rows are overwritten.

        {allgather_}
        """
        kind = None if type(array) is ndarray else device_kind(array)
        if kind is not None:
            made: Array = self._devices.allgather_(kind, array, name)
            return made
        target = InPlace(array, "allgather_")
        width = row_items(target.shape, "allgather_")
        bounds = tuple(row * width for row in even_bounds(target.shape[0], self.size))
        self._runner.all_gather(target.flat, bounds, name_of(name), target.shape)
        return target.finish()

    @documented
    def broadcast(self, array: Any, root_rank: int = 0, name: Optional[str] = None) -> Array:
        """Copy the root's array to every rank.

        {broadcast}
        """
        kind = None if type(array) is ndarray else device_kind(array)
        if kind is not None:
            made: Array = self._devices.broadcast(kind, array, "", self._root(root_rank), name)
            return made
        flat, shape = flat_copy(array)
        self._runner.broadcast(flat, self._root(root_rank), name_of(name), shape)
        return flat.reshape(shape)

    @documented
    def broadcast_(self, array: Array, root_rank: int = 0, name: Optional[str] = None) -> Array:
        """Overwrite ``array`` on every rank with the root's.

        {broadcast_}
        """
        kind = None if type(array) is ndarray else device_kind(array)
        if kind is not None:
            made: Array = self._devices.broadcast(kind, array, "broadcast_", self._root(root_rank), name)
            return made
        target = InPlace(array, "broadcast_")
        self._runner.broadcast(target.flat, self._root(root_rank), name_of(name), target.shape)
        return target.finish()

    @documented
    def alltoall(self, array: Any, splits: Optional[Sequence[int]] = None, name: Optional[str] = None) -> Any:
        """Send a part of the rows to every rank, and receive a part of the rows of every rank.

        {alltoall}
        """
        kind = None if type(array) is ndarray else device_kind(array)
        if kind is not None:
            result, received = self._devices.alltoall(kind, array, splits, name)
            return result if splits is None else (result, received)
        flat, shape = flat_view(array)
        width = row_items(shape, "alltoall")
        counts = check_splits(shape[0], splits, self.size)
        runner, label = self._runner, name_of(name)
        with runner.exclusive(parts=2):
            matrix = runner.exchange(counts, Collective.ALLTOALL, flat.dtype, label, shape[1:])
            received = matrix[:, self.rank]
            recv_bounds = cumulative(received, width)
            output = np.empty(recv_bounds[-1], flat.dtype)
            send_bounds = cumulative(np.asarray(counts, np.int64), width)
            runner.all_to_all(flat, output, send_bounds, recv_bounds, label, shape[1:])
        result = output.reshape(joined_shape(received, shape[1:]))
        return result if splits is None else (result, received.astype(np.int32))

    @documented
    def alltoall_(self, array: Array, name: Optional[str] = None) -> Array:
        """Exchange rows with every rank in place; every rank gets equally many rows.

        {alltoall_}
        """
        kind = None if type(array) is ndarray else device_kind(array)
        if kind is not None:
            made: Array = self._devices.alltoall_(kind, array, name)
            return made
        target = InPlace(array, "alltoall_")
        target.flat[:] = np.asarray(self.alltoall(target.flat.reshape(target.shape), name=name)).reshape(-1)
        return target.finish()

    # ---- coordination ------------------------------------------------------------------------

    @documented
    def barrier(self, name: Optional[str] = None) -> None:
        """Wait until every rank has called it.

        {barrier}
        """
        self._runner.barrier(name_of(name))

    @documented
    def broadcast_object(self, value: Any = None, root_rank: int = 0, name: Optional[str] = None) -> Any:
        """Send any object (pickled by cloudpickle) from the root to all ranks.

        {broadcast_object}
        """
        root = self._root(root_rank)
        kind = Collective.BROADCAST_OBJECT
        with self._runner.exclusive(parts=2):
            is_root = self.rank == root
            packed = self.objects.pack(value, "broadcast_object", name_of(name)) if is_root else NOTHING
            length = np.array([len(packed.data)], np.int64)
            self._runner.broadcast(length, root, name_of(name), (1,), kind)
            data = np.frombuffer(packed.data, np.uint8) if is_root else np.empty(int(length[0]), np.uint8)
            self._runner.broadcast(data, root, name_of(name), data.shape, kind)
            if is_root:
                packed.raise_error()
                return value
            # In the order of the calls, whichever thread made them; unpickling may make calls of its own.
            pickled = self.objects.verified(data, root, "broadcast_object", name_of(name))
        return self.objects.load(pickled)

    @documented
    def allgather_object(self, value: Any, name: Optional[str] = None) -> List[Any]:
        """Collect any object (pickled by cloudpickle) from every rank.

        {allgather_object}
        """
        kind = Collective.ALLGATHER_OBJECT
        with self._runner.exclusive(parts=2):
            packed = self.objects.pack(value, "allgather_object", name_of(name))
            payload = np.frombuffer(packed.data, np.uint8)
            lengths = self._runner.exchange([payload.size], kind, payload.dtype, name_of(name), ())
            bounds = cumulative(lengths[:, 0], 1)
            gathered = np.empty(bounds[-1], np.uint8)
            gathered[bounds[self.rank] : bounds[self.rank + 1]] = payload
            self._runner.all_gather(gathered, bounds, name_of(name), (), kind)
            pickled = {
                rank: self.objects.verified(
                    gathered[bounds[rank] : bounds[rank + 1]], rank, "allgather_object", name_of(name)
                )
                for rank in range(self.size)
                if rank != self.rank
            }
        packed.raise_error()
        return [
            value if rank == self.rank else self.objects.load(pickled[rank]) for rank in range(self.size)
        ]

    def _root(self, root_rank: int) -> int:
        try:
            root = operator.index(root_rank)
        except TypeError:
            raise Misuse(f"root_rank={root_rank!r} is not a whole number.") from None
        if not 0 <= root < self.size:
            raise Misuse(f"root_rank={root_rank}: this job has ranks 0 to {self.size - 1}.")
        return root
