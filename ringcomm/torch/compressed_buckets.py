"""Which bucket gradients get under a compression, and buckets of matrices that PowerSGD reduces."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch

from .. import api
from .._adapter.arguments import wire_name
from .._adapter.compression import NoneCompressor, codec_for, is_elementwise
from .._adapter.feedback import Residuals
from .._adapter.gradients import Reduction
from .._adapter.powersgd import Matrix, PowerIteration
from ..dtypes import Array
from ..ops import ReduceOp
from ..process_set import number_of, size_of
from . import handles
from .buckets import BLOCKWISE, Bucket, EachBucket, FlatBucket, Parameters
from .tensors import InPlace


class PowerBucket(FlatBucket):
    """Matrices of one device in one flat tensor, of which two thin matrices each are reduced.

    Args:
        compression: a :class:`~ringcomm._adapter.compression.PowerSGD`.
        residuals: of error feedback.
    """

    def __init__(
        self, parameters: Parameters, names: Sequence[str], reduction: Reduction, compression: Any,
        residuals: Residuals,
    ) -> None:  # fmt: skip
        super().__init__(parameters, names, reduction, NoneCompressor)
        self._options = compression
        self._all_residuals = residuals
        self._iteration = self._begin()
        self._own: List[Array] = []
        self._first: Optional[Any] = None
        self._absent_everywhere = 0

    def _begin(self) -> PowerIteration:
        matrices = [
            Matrix(name, int(parameter.shape[0]), parameter.numel() // int(parameter.shape[0]))
            for name, parameter in zip(self.names, self.parameters)
        ]
        return PowerIteration(matrices, self._options.rank, self._all_residuals)

    def operation_names(self) -> List[str]:
        """The names of the two reductions."""
        return [f"{self.name}.left", f"{self.name}.right"]

    def submit(self) -> None:
        """Start the first of two reductions, after all members have been taken."""
        flat = self._flat_tensor()
        self._version = flat._version
        sent = self._sent = InPlace(flat, "allreduce")
        elements = sent.flat if sent.mirror is None else sent.mirror.fetch()
        sizes = [parameter.numel() for parameter in self.parameters]
        self._own = [elements[start : start + size] for start, size in zip(self._starts, sizes)]
        if self.reduction.prescale != 1.0:
            elements *= self.reduction.prescale
        self._iteration.add_residuals(self._own)
        self._iteration.make_left(self._own)
        self._first = self._averaged(self._iteration.left, "left", self._absent_here())

    def _averaged(self, array: Array, side: str, absent: int = 0) -> Any:
        name = wire_name("allreduce", f"{self.name}.{side}")
        return api.context().engine.allreduce(
            [array], ReduceOp.AVERAGE, name, process_set=number_of(self.reduction.process_set), absent=absent
        )

    def advance(self) -> None:
        """Wait for the first reduction, and start the second."""
        first, self._first = self._first, None
        assert first is not None
        handles.synchronize(first)
        self._absent_everywhere = first.absent
        self._iteration.make_right(self._own)
        self.handle = self._averaged(self._iteration.right, "right")

    def finish(self) -> None:
        """Wait for the reduction, and set every member's gradient to its result."""
        handle, self.handle = self.handle, None
        handles.synchronize(handle)
        factor = self.reduction.postscale
        if self.reduction.op == ReduceOp.SUM:
            factor *= size_of(self.reduction.process_set)
        self._iteration.finish(self._own, factor)
        self._own = []
        if self._sent is not None and self._sent.mirror is not None:
            self._sent.mirror.store_all()
        self._deliver(self._absent_everywhere)

    def reset(self) -> None:
        """Drop a reduction in progress, and its memory."""
        if self._first is not None or self.handle is not None:
            self._iteration = self._begin()  # the engine may still write to the thin matrices
        super().reset()
        self._own, self._first = [], None

    def _like(self, parameters: Parameters, names: Sequence[str]) -> Bucket:
        return PowerBucket(parameters, names, self.reduction, self._options, self._all_residuals)


def codec_of(parameter: torch.Tensor, compression: Any) -> str:
    """How the gradient of a parameter is sent; see :func:`ringcomm._adapter.compression.codec_for`."""
    return codec_for(compression, str(parameter.dtype).rpartition(".")[2], parameter.shape)


def make_bucket(
    parameters: Parameters, names: Sequence[str], reduction: Reduction, compression: Any, residuals: Residuals
) -> Bucket:
    """A bucket for dense gradients: flat if dtype, device and compression allow it."""
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    codecs = {codec_of(parameter, compression) for parameter in parameters}
    adds = reduction.op in (ReduceOp.AVERAGE, ReduceOp.SUM)
    if len(kinds) == 1 and codecs == {"powersgd"} and adds:
        return PowerBucket(parameters, names, reduction, compression, residuals)
    if len(kinds) == 1 and is_elementwise(compression):
        # A group that the program has chosen may be of several kinds.
        coarse = sorted(codecs & BLOCKWISE)
        codec = coarse[0] if coarse else "bf16" if codecs & {"bf16", "powersgd"} else "none"
        return FlatBucket(parameters, names, reduction, compression, codec if adds else "none", residuals)
    plain = NoneCompressor if is_elementwise(compression) and codecs != {"none"} else compression
    return EachBucket(parameters, names, reduction, plain)
