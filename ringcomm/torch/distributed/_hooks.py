"""A communication hook for DistributedDataParallel that compresses gradients, with error feedback."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist

from ..._adapter.compression import codec_for, compressor_of
from ..._adapter.feedback import Residuals
from ...codec.base import BLOCK_ITEMS
from ...dtypes import Array
from ...errors import ConfigError, Misuse
from ...ops import ReduceOp, codec_number
from ._bridge import Flat
from ._group import ProcessGroupRingcomm

Hook = Callable[[Any, Any], Any]


def compress_hook(compression: Any = "int8") -> Hook:
    """A hook that averages gradients with a codec: gradients of matrices with it, all others as bfloat16.

    Example::

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, ringcomm.torch.distributed.compress_hook("int8"))

    What is lost of a gradient is added to the next one of the same parameter (error feedback). All ranks get
    the same bits. Every model needs a hook of its own. The first argument of ``register_comm_hook`` is the
    process group; None is the default group.

    Args:
        compression: ``"int8"`` (a quarter of the bytes of float32), ``"int4"`` (an eighth), ``"bf16"`` or
            ``"fp16"`` (half, without error feedback), or a member of ``ringcomm.torch.Compression``.

    Returns:
        a function for ``DistributedDataParallel.register_comm_hook``.

    Raises:
        ConfigError: there is no such codec.
    """
    kind = getattr(compressor_of(compression), "kind", "")
    if kind not in ("fp16", "bf16", "int8", "int4"):
        raise ConfigError(f"compress_hook({compression!r}): there are 'fp16', 'bf16', 'int8' and 'int4'.")
    reduction = _CompressedAverage(kind)

    def ringcomm_compress_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = reduction.start(_backend(state), bucket)
        return future

    # Annotations that are text do not pass DDP's check of hooks.
    ringcomm_compress_hook.__annotations__.clear()
    return ringcomm_compress_hook


def _backend(state: Any) -> ProcessGroupRingcomm:
    group = dist.group.WORLD if state is None else state
    if not isinstance(group, ProcessGroupRingcomm) and hasattr(group, "_get_backend"):
        group = group._get_backend(torch.device("cpu"))
    if not isinstance(group, ProcessGroupRingcomm):
        raise Misuse(
            f"compress_hook works over the backend 'ringcomm', and this is a {type(group).__name__}. The "
            "first argument of register_comm_hook is the process group, or None."
        )
    return group


class _CompressedAverage:
    """Averages DDP's buckets with one codec, and keeps residuals by parameter: DDP makes its buckets anew."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._compressor = compressor_of(kind)
        self._residuals = Residuals()
        self._plans: Dict[Tuple[int, ...], List[_Part]] = {}

    def start(self, group: ProcessGroupRingcomm, bucket: Any) -> Any:
        """Start averaging a bucket; a future of its buffer."""
        buffer = bucket.buffer()
        parts = self._parts(bucket)

        def run() -> None:
            flat = Flat(buffer, arithmetic=True)
            for part in parts:
                part.average(group, flat.array)
            flat.finish()

        work = group._begin("allreduce", [buffer], None, run)
        return work.get_future().then(lambda future: future.value()[0])

    def _parts(self, bucket: Any) -> List[_Part]:
        parameters = bucket.parameters()
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._plans:
            start = 0
            found: Dict[str, List[Tuple[int, int, str]]] = {}
            for parameter in parameters:
                dtype = str(parameter.dtype).rpartition(".")[2]
                codec = codec_for(self._compressor, dtype, parameter.shape)
                codec = self._kind if self._kind in ("fp16", "bf16") else codec
                stop = start + parameter.numel()
                found.setdefault(codec, []).append((start, stop, str(id(parameter))))
                start = stop
            self._plans[key] = [_Part(codec, found[codec], self._residuals) for codec in sorted(found)]
        return self._plans[key]


class _Part:
    """The gradients of a bucket that have one codec, as one array; each begins with a block of its own.

    Args:
        codec: its name.
        spans: where each gradient starts and stops in the bucket, and its parameter's key.
        residuals: of all parameters.
    """

    def __init__(self, codec: str, spans: Sequence[Tuple[int, int, str]], residuals: Residuals) -> None:
        self._codec = codec_number(codec)
        self._spans = [(start, stop) for start, stop, _ in spans]
        self._starts = [0]
        for start, stop in self._spans:
            blocks = -(-(stop - start) // BLOCK_ITEMS)
            self._starts.append(self._starts[-1] + blocks * BLOCK_ITEMS)
        self._packed = np.zeros(self._starts[-1], np.float32)
        self._lost = None
        if codec in ("int8", "int4"):
            names = [key for _, _, key in spans]
            sizes = [stop - start for start, stop, _ in spans]
            self._lost = residuals.side_by_side(names, sizes, self._starts, self._starts[-1])

    def average(self, group: ProcessGroupRingcomm, bucket: Array) -> None:
        """Average these gradients of the bucket over all ranks, in place."""
        packed = self._packed
        for (start, stop), place in zip(self._spans, self._starts):
            packed[place : place + stop - start] = bucket[start:stop]
        group._ops.runner.all_reduce(
            packed, ReduceOp.AVERAGE, "compressed gradients", codec=self._codec, residuals=self._lost
        )
        for (start, stop), place in zip(self._spans, self._starts):
            bucket[start:stop] = packed[place : place + stop - start]
