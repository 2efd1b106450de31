"""Reduce the gradients of one step while MXNet still computes some of them."""

from __future__ import annotations

from typing import Any, Iterator, List, Sequence

import mxnet as mx
import numpy as np

from .._adapter.gradients import Gradient, bucket_name, check_start, plan_buckets, plan_groups
from .._adapter.graph_callbacks import Batch, CompressionState, Operation
from .._adapter.reduction import Reduction
from ..dtypes import Array
from .arrays import NDArrayOperand, dense, flat_array


class GradientReducer:
    """Average gradients over the ranks of a process set; without groups, buckets have up to 8 MiB."""

    def __init__(self, how: Reduction) -> None:
        self.how = how
        self._state = CompressionState()
        self._key: List[Any] = []
        self._order: List[int] = []
        self._batch = Batch([])

    def reduce(
        self, names: Sequence[str], gradients: Sequence[mx.nd.NDArray], weights: Sequence[mx.nd.NDArray]
    ) -> None:
        """Overwrite gradients with the average of all ranks' gradients.

        They are submitted in the order in which a backward pass computes them, the last first, each bucket as
        soon as it is computed. ``names`` must be equal on all ranks; ranks that begin with different
        ``weights`` are warned. RingcommError: a reduction failed; all of them have ended.
        """
        if not self.how.active() or not gradients:
            return
        given = [dense(gradient, "the reduction of gradients") for gradient in gradients]
        self._divide(names, given)
        check_start(self.how.process_set, names[0], lambda: (flat_array(weight) for weight in weights))
        # The reduction executes ringcomm's own compressions, also those that are conversions elsewhere. What
        # one of the program's own returns may be a copy.
        is_own = hasattr(self.how.compression, "kind")
        _, sent, restore = (self.how, given, list) if is_own else self.how.prepared(given)
        targets: List[NDArrayOperand] = []

        def elements() -> Iterator[Array]:
            for index in self._order:
                target = NDArrayOperand(sent[index])
                targets.append(target)
                yield target.flat.reshape(target.shape)

        self._batch.overwrite(elements())
        for target in targets:
            target.finish()
        if not is_own:
            for gradient, result in zip(given, restore(sent)):
                gradient[:] = result

    def _divide(self, names: Sequence[str], gradients: Sequence[mx.nd.NDArray]) -> None:
        """Divide gradients into buckets, again when names, shapes or dtypes change."""
        key = [(name, tuple(item.shape), item.dtype) for name, item in zip(names, gradients)]
        if key == self._key:
            return
        if self.how.groups is None:
            sizes = [np.dtype(item.dtype).itemsize * item.size for item in gradients]
            kinds = [np.dtype(item.dtype).name for item in gradients]
            plan = plan_buckets([Gradient(*pair) for pair in zip(sizes, kinds)])
        else:
            plan = plan_groups(gradients, self.how.groups)
        operations = []
        for bucket in plan:
            label = bucket_name([names[index] for index in bucket], [key[index][1] for index in bucket])
            operations.append(Operation("allreduce", self.how, label, len(bucket), state=self._state))
        self._batch, self._key = Batch(operations), key
        self._order = [index for bucket in plan for index in bucket]
