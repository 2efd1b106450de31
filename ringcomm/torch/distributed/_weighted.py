"""A communication hook for DDP: averages gradients by weights, over any backend."""

from __future__ import annotations

import math
from typing import Any, Callable, Union

import torch
import torch.distributed as dist

from ...balance.batches import Balanced
from ...collective.weighted import NO_WEIGHTS
from ...errors import ConfigError, Misuse
from ...ops import weight_of

_HALF = (torch.float16, torch.bfloat16)


class WeightedAverage:
    """The state of :func:`weighted_average_hook`.

    Args:
        weight: the number of samples (or of tokens) behind this rank's gradients: a number, a function that
            is called for each bucket, or balanced batches with fixed speeds.
        process_group: the group of the model; None: the default one.

    Raises:
        ConfigError: the batches measure speeds; with DDP they cannot.
    """

    def __init__(
        self, weight: Union[float, Callable[[], float], Balanced], process_group: Any = None
    ) -> None:
        self.process_group = process_group
        self._cursor = None
        self._weight: Any = weight
        if isinstance(weight, Balanced):
            if weight.pace.division.measures and weight.pace.division.size > 1:
                raise ConfigError("With DDP pass speeds=[...] to the batches: its waits cannot be measured.")
            self._cursor = weight.pace.cursor()

    def now(self) -> float:
        """Return the weight of this rank's gradients in the current step.

        Raises:
            Misuse: it is negative, not finite or no number.
        """
        if self._cursor is not None:
            return self._cursor.now()
        return weight_of(self._weight() if callable(self._weight) else self._weight)

    def reduced(self) -> None:
        """Called when the last bucket of a step has been reduced."""
        if self._cursor is not None:
            self._cursor.reduced()


def weighted_average_hook(
    state: WeightedAverage, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients by weights, which are one more element of what is reduced.

    ::

        model = DistributedDataParallel(model)
        model.register_comm_hook(WeightedAverage(lambda: len(x)), weighted_average_hook)

    A rank of weight 0 contributes nothing, whatever its gradients are. Half types are sent as float32. A
    weight that this type does not represent (beyond 3e38, or below 1e-38 and not 0) is an error on all ranks.

    Args:
        state: the weight, and the process group.
        bucket: of the model's gradients.

    Returns:
        a future with the averaged gradients; it fails with :class:`ringcomm.Misuse` if all weights are 0, or
        the type of the gradients does not represent them.
    """
    buffer, weight, last = bucket.buffer(), state.now(), bucket.is_last()
    dtype = torch.float32 if buffer.dtype in _HALF else buffer.dtype
    sums = torch.zeros(buffer.numel() + 1, dtype=dtype, device=buffer.device)
    limits = torch.finfo(dtype)
    if weight and limits.tiny <= weight <= limits.max:
        sums[:-1] = buffer
        sums[:-1] *= weight
        sums[-1] = weight
    elif weight:
        sums[-1] = math.nan
    work = dist.all_reduce(sums, group=state.process_group, async_op=True)

    def finish(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()
        if not torch.isfinite(sums[-1]):
            raise Misuse(
                f"DDP: the weight of a rank, or the sum of all, is not in the range of {dtype}. Numbers of "
                "samples or of tokens are weights; divide larger ones by a constant."
            )
        if not sums[-1].real > 0:
            raise Misuse(f"DDP: {NO_WEIGHTS}")
        buffer.copy_(sums[:-1] / sums[-1])
        if last:
            state.reduced()
        return buffer

    assert work is not None
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
    return averaged


# PyTorch compares annotations with its own classes, and here they are texts.
weighted_average_hook.__annotations__.clear()
