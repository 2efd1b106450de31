"""Collectives through which gradients flow, as autograd functions: the forward pass and its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import numpy as np
import torch

from .. import api
from .._adapter.compressed import CompressedAllreduce, CompressedReducescatter
from .._adapter.gradients import Reduction
from ..ops import ReduceOp, weight_of
from ..process_set import ProcessSet, rank_in, size_of
from . import handles
from .tensors import flat_array, on_host, plain, tensor_of


class ReductionOptions(NamedTuple):
    """The arguments of a reduction and of its gradient.

    Attributes:
        codes: the compressor that the reduction executes; None: none.
    """

    op: ReduceOp
    name: Optional[str]
    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet
    weight: Optional[float] = None
    codes: Any = None


def _reduce_codes(kind: Any, options: ReductionOptions, tensors: Sequence[torch.Tensor]) -> Any:
    """Run a reduction whose compressor it executes itself, on copies in host memory."""
    hosts = [on_host(plain(tensor, "a reduction")) for tensor in tensors]
    arrays = [flat_array(host).reshape(tuple(host.shape)) for host in hosts]
    how = Reduction(options.op, options.prescale_factor, options.postscale_factor, options.process_set)
    operation = kind(how, options.name, len(arrays), options.codes)
    if options.weight is not None:
        operation = operation._replace(inputs=len(arrays) + 1, has_weight=True)
        arrays.append(np.float64(weight_of(options.weight)))
    results = operation.start(arrays, urgent=True).wait()
    return tuple(tensor_of(result, tensor) for result, tensor in zip(results, tensors))


class Allreduce(torch.autograd.Function):
    """Reduces tensors; the gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, options: ReductionOptions, *tensors: torch.Tensor) -> Any:
        """Reduce over all ranks."""
        ctx.options = options
        if options.codes is not None:
            return _reduce_codes(CompressedAllreduce, options, tensors)
        handle = handles.grouped_allreduce_async(
            tensors,
            None,
            options.name,
            options.op,
            options.prescale_factor,
            options.postscale_factor,
            options.process_set,
            True,
            options.weight,
        )
        return tuple(handles.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Reduce the gradients over all ranks."""
        options = ctx.options._replace(name=None)
        if options.weight is not None:
            # The derivative of a weighted average: the sum of the gradients, times this rank's share.
            own = torch.tensor([options.weight], dtype=torch.float64)
            plain = ReductionOptions(ReduceOp.SUM, None, 1.0, 1.0, options.process_set)
            *sums, total = Allreduce.apply(plain, *gradients, own)
            share = options.weight * options.prescale_factor * options.postscale_factor / float(total)
            return (None, *(item * share for item in sums))
        return (None, *Allreduce.apply(options, *gradients))


class Reducescatter(torch.autograd.Function):
    """Reduces tensors and keeps this rank's rows; the gradient gathers all rows, times the size for a sum."""

    @staticmethod
    def forward(ctx: Any, options: ReductionOptions, *tensors: torch.Tensor) -> Any:
        """Reduce over all ranks, and keep this rank's rows."""
        ctx.options = options
        if options.codes is not None:
            return _reduce_codes(CompressedReducescatter, options, tensors)
        handle = handles.grouped_reducescatter_async(
            tensors,
            options.name,
            options.op,
            options.process_set,
            options.prescale_factor,
            options.postscale_factor,
            True,
        )
        return tuple(handles.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gather the gradients of all rows."""
        options = ctx.options
        factor = options.prescale_factor * options.postscale_factor
        if options.op == ReduceOp.SUM:
            factor *= size_of(options.process_set)
        scaled = [gradient * factor for gradient in gradients]
        return (None, *Allgather.apply(None, options.process_set, *scaled))


class Allgather(torch.autograd.Function):
    """Gathers rows; the gradient is this rank's rows of the averaged gradients."""

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
        options = ReductionOptions(ReduceOp.AVERAGE, None, 1.0, 1.0, process_set)
        averaged = Allreduce.apply(options, *gradients)
        counts = torch.tensor([ctx.rows], dtype=torch.int64)
        (gathered,) = Allgather.apply(None, process_set, counts)
        before = gathered[: rank_in(process_set)].sum(0).tolist()
        own = [part.narrow(0, start, rows) for part, start, rows in zip(averaged, before, ctx.rows)]
        return (None, None, *own)


class Broadcast(torch.autograd.Function):
    """Broadcasts a tensor; the root's gradient is the averaged gradient, all others are zero."""

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
        options = ReductionOptions(ReduceOp.AVERAGE, None, 1.0, 1.0, ctx.process_set)
        (averaged,) = Allreduce.apply(options, gradients[0])
        own = averaged if api.rank() == ctx.root_rank else torch.zeros_like(averaged)
        return own, None, None, None


class Alltoall(torch.autograd.Function):
    """Exchanges rows; the gradient sends each row's gradient back to the rank that it came from."""

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
