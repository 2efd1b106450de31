"""A training step: when its gradients are ready, and how much of their reduction the computation hides."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import Callable, List, NamedTuple, Sequence, Tuple

from ..configuration.bucket_sizes import FUSION_BYTES

FORWARD = 1 / 3
"""Which part of the computation comes before the first gradient, where only its length is known."""


class Workload(NamedTuple):
    """One step of one rank, without communication.

    Attributes:
        compute_s: seconds of computation, of the slowest rank.
        gradients: bytes of every gradient in float32, in the order in which they become ready.
        ready_s: when each of them is ready, in seconds since the beginning of the step.
        usual_s: seconds of computation of a rank in the middle; 0.0: the same for all.
        bucket_bytes: gradients are reduced together up to so many bytes.
    """

    compute_s: float
    gradients: Tuple[int, ...]
    ready_s: Tuple[float, ...]
    usual_s: float = 0.0
    bucket_bytes: int = FUSION_BYTES


class Timing(NamedTuple):
    """Seconds of a step, and of the part of it without computation."""

    step_s: float
    exposed_s: float


def workload(compute_s: float, gradients: Sequence[int], overlap: bool = True) -> Workload:
    """A step of which only the lengths are known: gradients become ready in proportion to their bytes.

    >>> workload(3.0, [4, 4]).ready_s
    (2.0, 3.0)
    """
    total = sum(gradients)
    ready = [
        compute_s * (FORWARD + (1 - FORWARD) * done / total) if overlap else compute_s
        for done in accumulate(gradients)
    ]
    return Workload(compute_s, tuple(gradients), tuple(ready))


def time_step(work: Workload, reduce_s: Callable[[int], float], local_steps: int = 1) -> Timing:
    """Replay a step: whenever the channel is free, all gradients that are ready are reduced together.

    Args:
        work: the step.
        reduce_s: seconds of reducing so many bytes.
        local_steps: steps between two reductions, which nothing hides then.
    """
    cost_s = lru_cache(maxsize=None)(reduce_s)
    if local_steps > 1:
        reduced_s = sum(cost_s(nbytes) for nbytes in _filled(work)) / local_steps
        return Timing(work.compute_s + reduced_s, reduced_s)
    free_s, first, count = 0.0, 0, len(work.gradients)
    sums = [0, *accumulate(work.gradients)]
    while first < count:
        begin_s = max(free_s, work.ready_s[first])
        ready = bisect_right(work.ready_s, begin_s, first + 1)
        fits = bisect_right(sums, sums[first] + work.bucket_bytes, first + 2) - 1
        last = max(first + 1, min(ready, fits))
        free_s, first = begin_s + cost_s(sums[last] - sums[first]), last
    step_s = max(work.compute_s, free_s)
    return Timing(step_s, step_s - work.compute_s)


def _filled(work: Workload) -> List[int]:
    """All gradients in buckets."""
    buckets = [0]
    for nbytes in work.gradients:
        if buckets[-1] and buckets[-1] + nbytes > work.bucket_bytes:
            buckets.append(0)
        buckets[-1] += nbytes
    return buckets
