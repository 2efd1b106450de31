"""Synchronous collectives on tensors. Gradients flow through those that return new tensors."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import torch

from .. import api
from .._adapter.graph_callbacks import CompressionState, Operation
from .._adapter.reduction import Reduction, is_coded
from ..arrays.torch_tensors import tensor_of
from ..calls.process_set import ProcessSet, global_process_set, rank_in
from ..collective.options import Options, takes
from ..docstrings import documented
from ..ops import ReduceOp, weight_of
from . import handles
from .tensors import all_dense, array_of

__all__ = [
    "allgather", "allreduce", "allreduce_", "alltoall", "broadcast", "broadcast_", "grouped_allgather",
    "grouped_allreduce", "grouped_allreduce_", "grouped_reducescatter", "join", "reducescatter",
]  # fmt: skip


@takes("allreduce", "average name compression op prescale_factor postscale_factor process_set")
def allreduce(tensor: torch.Tensor, options: Options) -> torch.Tensor:
    """Reduce a tensor of the same shape and dtype over all ranks; every rank gets the result.

    Example: ``mean = hvd.allreduce(loss.detach(), name="loss")``.

    Args:
        {tensor_in}
        {options}

    Returns:
        a new tensor of the same shape, dtype and device, bit-identical on all ranks. Its gradient is the same
        reduction of the ranks' gradients.

    Raises:
        ConfigError: it is not a dense tensor, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    return _reduce([tensor], options)[0]


@takes("allreduce", "average name op prescale_factor postscale_factor process_set weight", "core")
def allreduce_(tensor: torch.Tensor, options: Options) -> torch.Tensor:
    """Reduce a tensor over all ranks in place; gradients do not flow through it.

    Args:
        {tensor_inplace}
        {options}

    Returns:
        ``tensor`` itself.

    Raises:
        ConfigError: it is not a dense tensor, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    result: torch.Tensor = handles.start_reduction([tensor], options, "allreduce_", True, False).wait()
    return result


@takes("allreduce", "average name compression op prescale_factor postscale_factor process_set")
def grouped_allreduce(tensors: Sequence[torch.Tensor], options: Options) -> List[torch.Tensor]:
    """Reduce several tensors over all ranks as one operation: all are reduced, or none.

    Args:
        {tensors_in}
        {options}

    Returns:
        a list of new tensors, in order; gradients flow through them.

    Raises:
        ConfigError: it is not a dense tensor, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    return _reduce(tensors, options)


def _reduce(tensors: Sequence[torch.Tensor], options: Options) -> List[torch.Tensor]:
    how, sent, restore = Reduction.of(options).prepared(all_dense(tensors, "allreduce"))
    return restore(Allreduce.apply(how, options.name, options.weight, *sent))


@takes("allreduce", "average name op prescale_factor postscale_factor process_set weight", "core")
def grouped_allreduce_(tensors: Sequence[torch.Tensor], options: Options) -> List[torch.Tensor]:
    """Reduce several tensors in place as one operation; gradients do not flow through them.

    Args:
        {tensors_inplace}
        {options}

    Returns:
        a list of the tensors themselves.

    Raises:
        ConfigError: it is not a dense tensor, or ``average`` and ``op`` are both given.
        {call_errors}
    """
    handle = handles.start_reduction(tensors, options, "grouped_allreduce_", True, True)
    results: List[torch.Tensor] = handle.wait()
    return results


@takes("reducescatter", "name compression op process_set prescale_factor postscale_factor")
def reducescatter(tensor: torch.Tensor, options: Options) -> torch.Tensor:
    """Reduce a tensor over all ranks; every rank gets only its rows of the result.

    Args:
        {tensor_in}
        {options}

    Returns:
        a new tensor with this rank's rows: of ``n`` rows every member of the set gets ``n // size``, the
        first ``n % size`` members one more. Gradients flow through it.

    Raises:
        ConfigError: it is not a dense tensor.
        ShapeError: the tensor has no first dimension.
        {call_errors}
    """
    return _scatter([tensor], options)[0]


@takes("reducescatter", "name compression op process_set prescale_factor postscale_factor")
def grouped_reducescatter(tensors: Sequence[torch.Tensor], options: Options) -> List[torch.Tensor]:
    """Reduce several tensors as one operation; every rank gets only its rows of each result.

    Args:
        {tensors_in}
        {options}

    Returns:
        a list of new tensors with this rank's rows; gradients flow through them.

    Raises:
        ConfigError: it is not a dense tensor.
        ShapeError: a tensor has no first dimension.
        {call_errors}
    """
    return _scatter(tensors, options)


def _scatter(tensors: Sequence[torch.Tensor], options: Options) -> List[torch.Tensor]:
    how, sent, restore = Reduction.of_rows(options).prepared(all_dense(tensors, "reducescatter"))
    return restore(Reducescatter.apply(how, options.name, options.weight, *sent))


@documented
def allgather(
    tensor: torch.Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate every rank's tensor along the first dimension, in rank order.

    Example: ``losses = hvd.allgather(loss.detach().view(1))``.

    Args:
        {tensor_rows}
        {matching}

    Returns:
        a new tensor with the rows of all ranks; their number may differ from rank to rank. Gradients flow
        through it.

    Raises:
        ConfigError: it is not a dense tensor.
        {call_errors}
    """
    (result,) = grouped_allgather([tensor], name, process_set)
    return result


@documented
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[torch.Tensor]:
    """Concatenate every rank's tensors along the first dimension, several tensors as one operation.

    Args:
        {tensors_rows}
        {matching}

    Returns:
        a list of new tensors with the rows of all ranks, in rank order; gradients flow through them.

    Raises:
        ConfigError: it is not a dense tensor.
        {call_errors}
    """
    return list(Allgather.apply(name, process_set, *all_dense(tensors, "allgather")))


@documented
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Copy the root's tensor to every rank, as a new tensor.

    Args:
        {tensor_in}
        {root_rank}
        {matching}

    Returns:
        a new tensor with the root's elements. The gradient of the root's tensor is the average over all
        ranks; the gradients of the other ranks' tensors are zero.

    Raises:
        ConfigError: it is not a dense tensor.
        {call_errors}
    """
    result: torch.Tensor = Broadcast.apply(tensor, root_rank, name, process_set)
    return result


@documented
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Overwrite a tensor on every rank with the root's; gradients do not flow through it.

    Args:
        {tensor_inplace}
        {root_rank}
        {matching}

    Returns:
        ``tensor`` itself.

    Raises:
        ConfigError: it is not a dense tensor.
        {call_errors}
    """
    result: torch.Tensor = handles.synchronize(
        handles.broadcast_async_(tensor, root_rank, name, process_set, True)
    )
    return result


@documented
def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Send a part of the rows to every rank, and receive a part of the rows of every rank.

    Args:
        {tensor_rows}
        {splits_tensor}
        {matching}

    Returns:
        the received rows in rank order; with ``splits``, a pair: the received rows, and the number of rows
        from each rank (int32). Gradients flow through the rows.

    Raises:
        ConfigError: it is not a dense tensor, or the splits do not fit it.
        {call_errors}
    """
    rows, received = Alltoall.apply(tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


@documented
def join(device: int = -1) -> int:
    """Announce that this rank has no more data, and wait until all ranks have announced it.

    Until then this rank contributes zeros to the other ranks' allreduces; an average still divides by the
    number of all ranks.

    Args:
        device: ignored; exists for Horovod's scripts.

    Returns:
        the rank that joined last, whose state is the newest.

    Raises:
        PeerLostError: a rank ended, or is silent for too long.
        {not_initialized}
    """
    last: int = api.context().engine.join().wait()
    return last


# ---- the collectives as autograd functions: the forward pass and its gradient ------------------------------


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
