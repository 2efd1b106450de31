"""Collectives through which gradients flow, as autograd functions: the forward pass and its gradient."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import numpy as np
import torch

from .. import api
from .._adapter.compressed import CompressionState
from .._adapter.graph_callbacks import Operation
from .._adapter.reduction import Reduction, is_coded
from ..arrays.torch_tensors import tensor_of
from ..calls.process_set import ProcessSet, rank_in
from ..collective.options import Options
from ..ops import ReduceOp, weight_of
from . import handles
from .tensors import array_of


def reduced(
    how: Reduction, name: Optional[str], tensors: Sequence[torch.Tensor], weight: Optional[float] = None,
    state: Optional[CompressionState] = None,
) -> Tuple[torch.Tensor, ...]:  # fmt: skip
    """Return reductions of tensors over all ranks, as one operation, without gradients."""
    if is_coded(how.compression):
        return _reduce_codes(Operation("allreduce", how, name, state=state), tensors, weight)
    return tuple(handles.start_reduction(tensors, how.call(name, weight), "allreduce", True, True).wait())


def _reduce_codes(
    operation: Operation, tensors: Sequence[torch.Tensor], weight: Optional[float]
) -> Tuple[torch.Tensor, ...]:
    """Run a reduction whose compressor it executes itself, on copies in host memory."""
    arrays = [array_of(tensor, "a reduction") for tensor in tensors]
    if weight is not None:
        arrays.append(np.float64(weight_of(weight)))
    whole = operation._replace(inputs=len(arrays), has_weight=weight is not None)
    results = whole.start(arrays, urgent=True).wait()
    return tuple(tensor_of(result).to(tensor.device) for result, tensor in zip(results, tensors))


class Allreduce(torch.autograd.Function):
    """Reduce tensors; the gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, how: Reduction, name: Optional[str], weight: Optional[float], *tensors: torch.Tensor
    ) -> Any:
        """Reduce over all ranks."""
        ctx.how, ctx.weight = how, weight
        return reduced(how, name, tensors, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Reduce the gradients over all ranks."""
        how, weight = ctx.how, ctx.weight
        if weight is not None:
            # The derivative of a weighted average: the sum of the gradients, times this rank's share.
            own = torch.tensor([weight], dtype=torch.float64)
            plain = Reduction(ReduceOp.SUM, process_set=how.process_set)
            *sums, total = Allreduce.apply(plain, None, None, *gradients, own)
            share = weight * how.factor / float(total)
            return (None, None, None, *(item * share for item in sums))
        return (None, None, None, *Allreduce.apply(how, None, None, *gradients))


class Reducescatter(torch.autograd.Function):
    """Reduce tensors and keep this rank's rows; the gradient gathers all rows, times the size for a sum."""

    @staticmethod
    def forward(
        ctx: Any, how: Reduction, name: Optional[str], weight: Optional[float], *tensors: torch.Tensor
    ) -> Any:
        """Reduce over all ranks, and keep this rank's rows."""
        ctx.how, ctx.weight = how, weight
        if is_coded(how.compression):
            return _reduce_codes(Operation("reducescatter", how, name), tensors, weight)
        options = Options(name=name, weight=weight, urgent=True)
        return tuple(handles.start_rows(tensors, how, options, True).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gather the gradients of all rows."""
        how, weight, factor = ctx.how, ctx.weight, ctx.how.gathered_factor
        if weight is not None:  # this rank's, relative to the mean of the weights
            own = torch.tensor([weight], dtype=torch.float64)
            (mean,) = Allreduce.apply(Reduction(process_set=how.process_set), None, None, own)
            factor *= weight / float(mean)
        gathered = Allgather.apply(None, how.process_set, *gradients)
        return (None, None, None, *(gradient * factor for gradient in gathered))


class Allgather(torch.autograd.Function):
    """Gather rows; the gradient is this rank's rows of the averaged gradients."""

    @staticmethod
    def forward(ctx: Any, name: Optional[str], process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        """Gather the rows of all ranks."""
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return tuple(handles.synchronize(handles.grouped_allgather_async(tensors, name, process_set, True)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Average the gradients, and keep this rank's rows."""
        process_set = ctx.process_set
        averaged = Allreduce.apply(Reduction(process_set=process_set), None, None, *gradients)
        counts = torch.tensor([ctx.rows], dtype=torch.int64)
        (gathered,) = Allgather.apply(None, process_set, counts)
        before = gathered[: rank_in(process_set)].sum(0).tolist()
        own = [part.narrow(0, start, rows) for part, start, rows in zip(averaged, before, ctx.rows)]
        return (None, None, *own)


class Broadcast(torch.autograd.Function):
    """Broadcast a tensor; the root's gradient is the averaged gradient, all others are zero."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: Optional[str], process_set: ProcessSet
    ) -> Any:
        """Copy the root's tensor."""
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        return handles.synchronize(handles.broadcast_async(tensor, root_rank, name, process_set, True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Average the gradients for the root; zeros for the other ranks."""
        (averaged,) = Allreduce.apply(Reduction(process_set=ctx.process_set), None, None, gradients[0])
        own = averaged if api.rank() == ctx.root_rank else torch.zeros_like(averaged)
        return own, None, None, None


class Alltoall(torch.autograd.Function):
    """Exchange rows; the gradient sends each row's gradient back to the rank that it came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: Optional[str], process_set: ProcessSet
    ) -> Any:
        """Exchange rows."""
        rows, received = handles.synchronize(handles.alltoall_async(tensor, splits, name, process_set, True))
        ctx.received = received.cpu()
        ctx.process_set = process_set
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return each row's gradient to its rank."""
        returned, _ = Alltoall.apply(gradients[0], ctx.received, None, ctx.process_set)
        return returned, None, None, None
