"""Communication hooks for DistributedDataParallel: compressed gradients, and averages by weights."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Sequence, Tuple, Union

import numpy as np
import torch
import torch.distributed as dist

from ..._adapter.compression import Residuals, codec_for, compressor_of, dtype_name
from ...balance.batches import Balanced
from ...codec.codecs import BLOCK_ITEMS
from ...collective.reduce import NO_WEIGHTS
from ...collective.rows import cumulative
from ...errors import ConfigError, Misuse
from ...ops import BLOCKWISE, CODECS, HALVES, codec_number, weight_of
from ._collectives import Packed
from ._group import backend_of

Hook = Callable[[Any, Any], Any]
_HALF = (torch.float16, torch.bfloat16)


def compress_hook(compression: Any = "int8") -> Hook:
    """Return a hook that averages gradients of matrices with a codec, and other gradients as bfloat16.

    Example::

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, ringcomm.torch.distributed.compress_hook("int8"))

    The rounding error of a gradient is added to the next gradient of the same parameter (error feedback). All
    ranks get the same bits. Every model needs its own hook. The first argument of ``register_comm_hook`` is
    the process group; None is the default group.

    Args:
        compression: ``"int8"`` (a quarter of the bytes of float32), ``"int4"`` (an eighth), ``"bf16"`` or
            ``"fp16"`` (half, without error feedback), or a member of ``ringcomm.torch.Compression``.

    Returns:
        a function for ``DistributedDataParallel.register_comm_hook``.

    Raises:
        ConfigError: there is no such codec.
    """
    kind = getattr(compressor_of(compression), "kind", "")
    if kind not in CODECS[1:]:
        raise ConfigError(f"compress_hook({compression!r}): there are {', '.join(map(repr, CODECS[1:]))}.")
    plans = _Plans(kind)

    def ringcomm_compress_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        group = dist.group.WORLD if state is None else state
        found = backend_of(group)
        if found is None:
            raise Misuse(
                f"compress_hook works over the backend 'ringcomm', and this is a {type(group).__name__}. The "
                "first argument of register_comm_hook is the process group, or None."
            )
        work = found.allreduce_packed(bucket.buffer(), plans.of(bucket.parameters()))
        return work.get_future().then(lambda future: future.value()[0])

    # Annotations that are text do not pass DDP's check of hooks.
    ringcomm_compress_hook.__annotations__.clear()
    return ringcomm_compress_hook


class _Plans:
    """The parts of DDP's buckets, with residuals by parameter: DDP rebuilds its buckets."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._compressor = compressor_of(kind)
        self._residuals = Residuals()
        self._plans: Dict[Tuple[int, ...], List[Packed]] = {}

    def of(self, parameters: Sequence[torch.Tensor]) -> List[Packed]:
        """Return the parts of the bucket of these parameters, each with its codec."""
        key = tuple(map(id, parameters))
        if key not in self._plans:
            start = 0
            found: Dict[str, List[Tuple[int, int, str]]] = {}
            for parameter in parameters:
                codec = codec_for(self._compressor, dtype_name(parameter), parameter.shape)
                codec = self._kind if self._kind in HALVES else codec
                stop = start + parameter.numel() * (2 if parameter.is_complex() else 1)
                found.setdefault(codec, []).append((start, stop, str(id(parameter))))
                start = stop
            self._plans[key] = [self._packed(codec, found[codec]) for codec in sorted(found)]
        return self._plans[key]

    def _packed(self, codec: str, spans: Sequence[Tuple[int, int, str]]) -> Packed:
        """Return a bucket's gradients (start, stop, key) with this codec; each begins with a new block."""
        sizes = [stop - start for start, stop, _ in spans]
        blocks = np.array([-(-size // BLOCK_ITEMS) for size in sizes])
        *starts, count = cumulative(blocks, BLOCK_ITEMS)
        residuals = None
        if codec in BLOCKWISE:
            residuals = self._residuals.side_by_side([key for _, _, key in spans], sizes, starts, count)
        places = [(start, stop, place) for (start, stop, _), place in zip(spans, starts)]
        return Packed(codec_number(codec), places, np.zeros(count, np.float32), residuals)


class WeightedAverage:
    """The state of :func:`weighted_average_hook`.

    Args:
        weight: the number of samples (or tokens) from which this rank's gradients are computed. It is a
            number, a function that is called for each bucket, or balanced batches with fixed speeds.
        process_group: the process group of the model; None: the default group.

    Raises:
        ConfigError: the batches measure speeds, which is not possible with DDP.
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
            Misuse: the weight is negative, not finite or not a number.
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
    """Average a bucket of gradients by weights. The weights are reduced with the bucket.

    ::

        model = DistributedDataParallel(model)
        model.register_comm_hook(WeightedAverage(lambda: len(x)), weighted_average_hook)

    A rank with weight 0 contributes nothing, whatever its gradients are. float16 and bfloat16 are sent as
    float32. A weight that the sent type cannot represent (float32: beyond 3e38, or below 1e-38 and not 0) is
    an error on all ranks.

    Args:
        state: the weight and the process group.
        bucket: a bucket of the model's gradients.

    Returns:
        a future with the averaged gradients. It fails with :class:`ringcomm.Misuse` if all weights are 0, or
        if the type of the gradients cannot represent the weights.
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
    return work.get_future().then(finish)


# PyTorch compares annotations with its own classes, and here they are texts.
weighted_average_hook.__annotations__.clear()
