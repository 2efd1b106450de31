"""Batch normalization with the mean and variance over the batches of all ranks."""

from __future__ import annotations

from typing import Any, List, Optional

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .. import api
from ..calls.process_set import ProcessSet, global_process_set
from ..ops import ReduceOp
from .mpi_ops import allgather_async, allreduce_async


class SyncBatchNorm(_BatchNorm):
    """Batch normalization in which mean and variance are computed over the batches of all ranks.

    It replaces ``torch.nn.BatchNorm1d``, ``2d`` and ``3d``, also on the CPU. The input has the shape
    ``(batch, num_features, ...)``. Batch sizes may differ between ranks, and a rank's batch may be empty.

    Args:
        num_features: number of channels, the input's second dimension.
        eps: added to the variance before its square root is taken.
        momentum: weight of a new batch in the running statistics. None: the statistics are cumulative
            averages.
        affine: whether to have a learnable weight and bias per channel.
        track_running_stats: whether to keep running statistics for evaluation.
        process_set: the ranks over whose batches mean and variance are computed.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: Optional[float] = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_set: ProcessSet = global_process_set,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch of shape ``(batch, num_features, ...)``. All ranks must call it in training mode.

        In evaluation mode it is not a collective. Without running statistics, it then uses only the batch of
        this rank, like ``torch.nn.SyncBatchNorm``.
        """
        if not self.training or api.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        return _Normalize.apply(
            input, self.weight, self.bias, self.running_mean, self.running_var,
            self.eps, factor, self._process_set,
        )  # fmt: skip


def _reduced_dims(tensor: torch.Tensor) -> List[int]:
    return [0, *range(2, tensor.dim())]


def _spread(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one number per channel, in a shape that broadcasts with a batch."""
    return values.view(1, -1, *([1] * (like.dim() - 2)))


class _Normalize(torch.autograd.Function):
    """The normalization and its gradient; each runs one collective with a few numbers per channel."""

    @staticmethod
    def forward(
        ctx: Any, batch: torch.Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any,
        eps: float, factor: float, process_set: ProcessSet,
    ) -> torch.Tensor:  # fmt: skip
        wide = batch.to(torch.float32) if batch.dtype in (torch.float16, torch.bfloat16) else batch
        mean, variance, total = _statistics(wide, process_set)
        if running_mean is not None and running_var is not None:
            unbiased = variance * (total / max(total - 1.0, 1.0))
            running_mean.mul_(1.0 - factor).add_(mean.to(running_mean.dtype), alpha=factor)
            running_var.mul_(1.0 - factor).add_(unbiased.to(running_var.dtype), alpha=factor)
        inverse = torch.rsqrt(variance + eps).to(wide.dtype)
        centered = wide - _spread(mean.to(wide.dtype), wide)
        result = centered * _spread(inverse, wide)
        if weight is not None:
            result = result * _spread(weight.to(wide.dtype), wide)
        if bias is not None:
            result = result + _spread(bias.to(wide.dtype), wide)
        ctx.save_for_backward(centered, inverse, weight)
        ctx.total, ctx.process_set = total, process_set
        ctx.bias_dtype = None if bias is None else bias.dtype
        return result.to(batch.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        centered, inverse, weight = ctx.saved_tensors
        gradient = gradients[0].to(centered.dtype)
        dims = _reduced_dims(gradient)
        plain_sum, moment = gradient.sum(dims), (gradient * centered).sum(dims)
        both = torch.cat([plain_sum, moment])
        handle = allreduce_async(
            both, name="sync_batch_norm.backward", op=ReduceOp.SUM, process_set=ctx.process_set, urgent=True
        )
        total_sum, total_moment = handle.wait().chunk(2)
        count = max(ctx.total, 1.0)
        correction = centered * _spread(inverse * inverse * total_moment / count, centered)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        own = (gradient - _spread(total_sum / count, gradient) - correction) * _spread(scale, gradient)
        grad_weight = None if weight is None else (moment * inverse).to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else plain_sum.to(ctx.bias_dtype)
        return own.to(gradients[0].dtype), grad_weight, grad_bias, None, None, None, None, None


def _statistics(batch: torch.Tensor, process_set: ProcessSet) -> Any:
    """Return mean and variance per channel over all ranks (float64), and the elements per channel."""
    dims = _reduced_dims(batch)
    channels = batch.shape[1]
    count = batch.numel() // channels if channels else 0
    mean = batch.mean(dims) if count else batch.new_zeros(channels)
    deviations = (batch - _spread(mean, batch)).square().sum(dims)
    mine = torch.cat([mean.double(), deviations.double(), mean.new_tensor([count], dtype=torch.float64)])
    gathered = allgather_async(mine.unsqueeze(0), "sync_batch_norm.forward", process_set, urgent=True).wait()
    counts = gathered[:, -1:]
    means, squares = gathered[:, :channels], gathered[:, channels:-1]
    total = float(counts.sum())
    # Sums of squared deviations from each rank's own mean, corrected to the common mean: this avoids the
    # cancellation of large numbers.
    common = (means * counts).sum(0) / max(total, 1.0)
    variance = (squares + counts * (means - common).square()).sum(0) / max(total, 1.0)
    return common, variance, total
