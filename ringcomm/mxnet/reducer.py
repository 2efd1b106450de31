"""Reduces the gradients of one step while MXNet still computes some of them."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import api
from .._adapter.arguments import predivided, wire_name
from .._adapter.choice import configured
from .._adapter.compressed import CompressedAllreduce, CompressionState
from .._adapter.gradients import Gradient, Reduction, bucket_name, chosen_groups, plan_buckets, plan_groups
from .._adapter.waiting import run_all
from ..ops import ReduceOp
from ..process_set import ProcessSet, included_in, number_of, size_of
from .arrays import InPlace, dense

Finish = Callable[[], Any]


class GradientReducer:
    """Averages gradients over the ranks of a process set.

    Args:
        process_set: the ranks that take part.
        factor: of ``gradient_predivide_factor``.
        num_groups: number of groups, each reduced as one operation; 0: buckets of up to 8 MiB.
        compression: a compressor or its name.
    """

    def __init__(self, process_set: ProcessSet, factor: float, num_groups: int, compression: Any) -> None:
        prescale, postscale = predivided(ReduceOp.AVERAGE, factor)
        self.how = Reduction(ReduceOp.AVERAGE, prescale, postscale, process_set)
        self._compression = configured(compression, process_set)
        self._groups = chosen_groups(None, num_groups, mx.nd.NDArray)
        self._state = CompressionState()
        self._key: Optional[List[Any]] = None
        self._plan: List[Tuple[List[int], str]] = []

    def active(self) -> bool:
        """Whether this rank is in the process set, and has other ranks to reduce with."""
        return bool(included_in(self.how.process_set)) and size_of(self.how.process_set) > 1

    def reduce(self, names: Sequence[str], gradients: Sequence[mx.nd.NDArray]) -> None:
        """Overwrite gradients with the average of all ranks' gradients.

        They are submitted in the order in which a backward pass computes them, the last first, each bucket as
        soon as it is computed.

        Args:
            names: of the gradients; the same on all ranks.
            gradients: in the same order.

        Raises:
            RingcommError: a reduction failed; all of them have ended.
        """
        if not self.active():
            return
        given = [dense(gradient, "the reduction of gradients") for gradient in gradients]
        started: List[Finish] = []
        for indices, label in self._buckets(names, given):
            started.append(self._start([given[index] for index in indices], label))
        run_all(started)

    def _buckets(
        self, names: Sequence[str], gradients: Sequence[mx.nd.NDArray]
    ) -> List[Tuple[List[int], str]]:
        """The indices and the name of each bucket; made again when names, shapes or dtypes change."""
        key = [(name, tuple(item.shape), item.dtype) for name, item in zip(names, gradients)]
        if key != self._key:
            if self._groups is None:
                sizes = [np.dtype(item.dtype).itemsize * item.size for item in gradients]
                kinds = [np.dtype(item.dtype).name for item in gradients]
                plan = plan_buckets([Gradient(*pair) for pair in zip(sizes, kinds)])
            else:
                plan = plan_groups(gradients, self._groups)
            self._plan = [
                (bucket, bucket_name([names[index] for index in bucket], [key[index][1] for index in bucket]))
                for bucket in plan
            ]
            self._key = key
        return self._plan

    def _start(self, gradients: Sequence[mx.nd.NDArray], label: str) -> Finish:
        kind = getattr(self._compression, "kind", None)
        if kind == "none":
            return self._start_plain(gradients, label)
        if kind is not None:
            return self._start_compressed(gradients, label)
        # A compression of the program's own: what it returns may be a copy.
        pairs = [self._compression.compress(gradient) for gradient in gradients]
        finish = self._start_plain([compressed for compressed, _ in pairs], label)

        def decompress() -> None:
            finish()
            for gradient, (compressed, context) in zip(gradients, pairs):
                gradient[:] = self._compression.decompress(compressed, context)

        return decompress

    def _start_plain(self, gradients: Sequence[mx.nd.NDArray], label: str) -> Finish:
        targets = [InPlace(gradient) for gradient in gradients]
        handle = api.context().engine.allreduce(
            [target.flat for target in targets], self.how.op, wire_name("allreduce", label),
            [target.shape for target in targets], self.how.prescale, self.how.postscale,
            number_of(self.how.process_set), convert=lambda _: [target.finish() for target in targets],
        )  # fmt: skip
        return handle.wait

    def _start_compressed(self, gradients: Sequence[mx.nd.NDArray], label: str) -> Finish:
        targets = [InPlace(gradient) for gradient in gradients]
        operation = CompressedAllreduce(self.how, label, len(targets), self._compression, self._state)
        pending = operation.start([target.flat.reshape(target.shape) for target in targets])

        def write_back() -> None:
            for target, result in zip(targets, pending.wait()):
                target.flat[:] = result.reshape(-1)
                target.finish()

        return write_back
