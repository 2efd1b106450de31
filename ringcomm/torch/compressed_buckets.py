"""Which bucket gradients get under a compression, and buckets of matrices that PowerSGD reduces."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch

from .. import api
from .._adapter.compressed import PowerReduction
from .._adapter.compression import BLOCKWISE, NoneCompressor, codec_for, is_elementwise
from .._adapter.feedback import Residuals
from .._adapter.powersgd import Matrix, PowerIteration
from .._adapter.reduction import Reduction
from ..arrays.operands import Operand
from . import handles
from .buckets import Bucket, EachBucket, FlatBucket, Parameters
from .tensors import operand_of


class PowerBucket(FlatBucket):
    """Matrices of one device in one flat tensor, of which two thin matrices each are reduced.

    Args:
        reduction: with a :class:`~ringcomm._adapter.compression.PowerSGD`.
        residuals: of error feedback.
    """

    def __init__(
        self, parameters: Parameters, names: Sequence[str], reduction: Reduction, residuals: Residuals
    ) -> None:
        super().__init__(parameters, names, reduction)
        self._all_residuals = residuals
        self._power = self._begin()
        self._absent_everywhere = 0
        self._sent: Optional[Operand] = None

    def _begin(self) -> PowerReduction:
        matrices = [
            Matrix(name, int(parameter.shape[0]), parameter.numel() // int(parameter.shape[0]))
            for name, parameter in zip(self.names, self.parameters)
        ]
        iteration = PowerIteration(matrices, self.reduction.compression.rank, self._all_residuals)
        return PowerReduction(iteration, self.reduction, self.name)

    def operation_names(self) -> List[str]:
        """The names of the two reductions."""
        return [f"{self.name}.left", f"{self.name}.right"]

    def submit(self) -> None:
        """Start the first of two reductions, after all members have been taken."""
        flat = self._flat_tensor()
        self._version = flat._version
        sent = self._sent = operand_of(flat, "allreduce", in_place=True)
        if sent.mirror is not None:
            api.context().group.runner.fetch([sent.mirror])
        elements = sent.flat
        sizes = [parameter.numel() for parameter in self.parameters]
        own = [elements[start : start + size] for start, size in zip(self._starts, sizes)]
        self._power.start(own, self._absent_here())

    def advance(self) -> None:
        """Wait for the first reduction, and start the second."""
        self._absent_everywhere = self._power.advance()

    def finish(self) -> None:
        """Wait for the reduction, and set every member's gradient to its result."""
        self._power.finish()
        sent, self._sent = self._sent, None
        assert sent is not None
        if sent.mirror is not None:
            sent.mirror.store_all()
        self._deliver(sent.finish(), self._absent_everywhere)

    def wait(self) -> None:
        """Wait for the first reduction; there is no other one yet."""
        handles.synchronize(self._power.first)

    def reset(self) -> None:
        """Drop a reduction in progress, and its memory."""
        if self._power.running:
            self._power = self._begin()  # the engine may still write to the thin matrices
        self._sent = None
        super().reset()

    def _like(self, parameters: Parameters, names: Sequence[str]) -> Bucket:
        return PowerBucket(parameters, names, self.reduction, self._all_residuals)


def codec_of(parameter: torch.Tensor, compression: Any) -> str:
    """Return how the gradient of a parameter is sent; see :func:`ringcomm._adapter.compression.codec_for`."""
    return codec_for(compression, str(parameter.dtype).rpartition(".")[2], parameter.shape)


def make_bucket(
    parameters: Parameters, names: Sequence[str], reduction: Reduction, residuals: Residuals
) -> Bucket:
    """A bucket for dense gradients: flat if dtype, device and compression allow it."""
    compression = reduction.compression
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    codecs = {codec_of(parameter, compression) for parameter in parameters}
    if len(kinds) == 1 and codecs == {"powersgd"} and reduction.adds:
        return PowerBucket(parameters, names, reduction, residuals)
    if len(kinds) == 1 and is_elementwise(compression):
        # A group that the program has chosen may be of several kinds.
        coarse = sorted(codecs & BLOCKWISE)
        codec = coarse[0] if coarse else "bf16" if codecs & {"bf16", "powersgd"} else "none"
        return FlatBucket(parameters, names, reduction, codec if reduction.adds else "none", residuals)
    if is_elementwise(compression) and codecs != {"none"}:
        reduction = reduction._replace(compression=NoneCompressor)
    return EachBucket(parameters, names, reduction)
