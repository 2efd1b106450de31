"""Synchronous collectives over arrays that devices hold; :mod:`ringcomm.collectives` calls them.

The calling thread waits until everything has been sent and received and the last copies to the device have
been started. It does not wait for these: its current stream on the device does.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Tuple

import numpy as np

from .arrays.kinds import DeviceKind
from .arrays.mirrors import StagingPool
from .arrays.operands import Operand
from .arrays.rows import check_splits, cumulative, row_items
from .collective.runner import Runner
from .collective.staged import Staging
from .dtypes import joined_shape
from .ops import Collective, ReduceOp, codec_number, factor_of, name_of, op_of
from .schedule.steps import even_bounds

HostReduction = Callable[..., None]


class DeviceCollectives:
    """The collectives of one rank on arrays of devices.

    Args:
        runner: moves flat arrays.

    Attributes:
        pool: the page-locked memory.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.pool = StagingPool()

    def allreduce(
        self,
        kind: DeviceKind,
        array: Any,
        in_place: str,
        op: ReduceOp,
        name: Optional[str],
        prescale: float,
        postscale: float,
        compression: Any,
        weight: Optional[float],
        host_all_reduce: HostReduction,
    ) -> Any:
        """Reduce an array; with Adasum, a codec or a weight, copies and the reduction do not overlap.

        Args:
            host_all_reduce: reduces a flat NumPy array with every option.
        """
        operand = Operand(self.pool, kind, array, in_place)
        whole = weight is not None or op_of(op) == ReduceOp.ADASUM or codec_number(compression) != 0
        if whole or self._runner.size == 1:
            self._runner.fetch([operand.mirror])
            host = operand.flat
            host_all_reduce(host, operand.shape, op, name, prescale, postscale, compression, weight)
            operand.mirror.store_all()
        else:
            self._runner.all_reduce(
                operand.flat, op_of(op), name_of(name), operand.shape, factor_of(prescale),
                factor_of(postscale), staging=Staging(operand.mirror, ((0, operand.count),)),
            )  # fmt: skip
        return operand.finish()

    def reducescatter(
        self,
        kind: DeviceKind,
        array: Any,
        in_place: str,
        op: ReduceOp,
        name: Optional[str],
        prescale: float,
        postscale: float,
    ) -> Any:
        """Reduce an array; the result is this rank's rows."""
        runner = self._runner
        shape, _ = kind.describe(array)
        width = row_items(shape, "reducescatter_" if in_place else "reducescatter")
        rows = even_bounds(shape[0], runner.size)
        bounds = tuple(row * width for row in rows)
        first, last = rows[runner.rank], rows[runner.rank + 1]
        part = (bounds[runner.rank], bounds[runner.rank + 1])
        operand = Operand(self.pool, kind, array, in_place, part)
        alone = runner.size == 1
        if alone:
            runner.fetch([operand.mirror])
        runner.reduce_scatter(
            operand.flat, bounds, op_of(op), name_of(name), shape, factor_of(prescale), factor_of(postscale),
            staging=None if alone else Staging(operand.mirror, (part,)),
        )  # fmt: skip
        if alone:
            operand.mirror.store_all()
        result = operand.finish((last - first, *shape[1:]))
        return result[first:last] if in_place else result

    def allgather(self, kind: DeviceKind, array: Any, name: Optional[str]) -> Any:
        """Concatenate every rank's rows."""
        runner, label = self._runner, name_of(name)
        shape, dtype = kind.describe(array)
        flat, _ = kind.flat(array)
        shape = shape or (1,)
        width = row_items(shape, "allgather")
        with runner.exclusive(parts=2):
            rows = runner.exchange([shape[0]], Collective.ALLGATHER, dtype, label, shape[1:])[:, 0]
            bounds = cumulative(rows, width)
            output = kind.empty(array, (bounds[-1],))
            kind.assign(output[bounds[runner.rank] : bounds[runner.rank + 1]], flat)
            mirror = self.pool.mirror(kind, output)
            staging = Staging(mirror, ((0, bounds[-1]),))
            runner.all_gather(mirror.host, bounds, label, shape[1:], staging=staging)
        mirror.finish()
        return kind.result(kind.reshaped(output, joined_shape(rows, shape[1:])), array)

    def allgather_(self, kind: DeviceKind, array: Any, name: Optional[str]) -> Any:
        """Complete an array of which every rank holds its rows."""
        operand = Operand(self.pool, kind, array, "allgather_")
        width = row_items(operand.shape, "allgather_")
        bounds = tuple(row * width for row in even_bounds(operand.shape[0], self._runner.size))
        staging = Staging(operand.mirror, ((0, operand.count),))
        self._runner.all_gather(operand.flat, bounds, name_of(name), operand.shape, staging=staging)
        return operand.finish()

    def broadcast(self, kind: DeviceKind, array: Any, in_place: str, root: int, name: Optional[str]) -> Any:
        """Copy the root's array to every rank."""
        operand = Operand(self.pool, kind, array, in_place)
        if not in_place and self._runner.rank == root:
            kind.assign(operand.output, operand.on_device)
        staging = Staging(operand.mirror, ((0, operand.count),))
        self._runner.broadcast(operand.flat, root, name_of(name), operand.shape, staging=staging)
        return operand.finish()

    def alltoall(
        self, kind: DeviceKind, array: Any, splits: Optional[Sequence[int]], name: Optional[str]
    ) -> Tuple[Any, np.ndarray[Any, Any]]:
        """Exchange rows; the received rows, and their number from each rank."""
        runner, label = self._runner, name_of(name)
        shape, dtype = kind.describe(array)
        flat, _ = kind.flat(array)
        width = row_items(shape, "alltoall")
        counts = check_splits(shape[0], splits, runner.size)
        with runner.exclusive(parts=2):
            matrix = runner.exchange(counts, Collective.ALLTOALL, dtype, label, shape[1:])
            received = matrix[:, runner.rank]
            into = cumulative(received, width)
            send = cumulative(np.asarray(counts, np.int64), width)
            output = kind.empty(array, (into[-1],))
            rank = runner.rank
            kind.assign(output[into[rank] : into[rank + 1]], flat[send[rank] : send[rank + 1]])
            source, data = self.pool.mirror(kind, flat), self.pool.mirror(kind, output)
            staging = Staging(data, ((0, into[-1]),), source)
            runner.all_to_all(source.host, data.host, send, into, label, shape[1:], staging=staging)
        data.finish()
        source.finish()
        rows = kind.reshaped(output, joined_shape(received, shape[1:]))
        return kind.result(rows, array), received.astype(np.int32)

    def alltoall_(self, kind: DeviceKind, array: Any, name: Optional[str]) -> Any:
        """Exchange rows in place."""
        kind.check_writable(array, "alltoall_")
        rows, _ = self.alltoall(kind, array, None, name)
        kind.assign(array, rows)
        return array
