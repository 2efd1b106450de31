"""The collectives that wait for their result, through which gradients flow."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

import torch

from .. import api
from .._adapter.arguments import reduction
from ..ops import ReduceOp, op_of
from ..process_set import ProcessSet, global_process_set, number_of
from . import handles
from .compression import Compression


class _How(NamedTuple):
    """The arguments of a reduction, as it and its gradient take them."""

    op: ReduceOp
    name: Optional[str]
    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet


class _Allreduce(torch.autograd.Function):
    """The gradient of a reduction is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, how: _How, *tensors: torch.Tensor) -> Any:
        ctx.how = how
        handle = handles.grouped_allreduce_async(
            tensors, None, how.name, how.op, how.prescale_factor, how.postscale_factor, how.process_set, True
        )
        return tuple(handles.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        how = ctx.how._replace(name=None)
        return (None, *_Allreduce.apply(how, *gradients))


class _Reducescatter(torch.autograd.Function):
    """Everybody needs the gradients of all rows; of a sum that of all ranks, as losses are averaged."""

    @staticmethod
    def forward(ctx: Any, how: _How, *tensors: torch.Tensor) -> Any:
        ctx.how = how
        handle = handles.grouped_reducescatter_async(
            tensors, how.name, how.op, how.process_set, how.prescale_factor, how.postscale_factor, True
        )
        return tuple(handles.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        how = ctx.how
        factor = how.prescale_factor * how.postscale_factor
        if how.op == ReduceOp.SUM:
            factor *= how.process_set.size()
        scaled = [gradient * factor for gradient in gradients]
        return (None, *_Allgather.apply(None, how.process_set, *scaled))


class _Allgather(torch.autograd.Function):
    """A rank's own rows of the averaged gradients."""

    @staticmethod
    def forward(ctx: Any, name: Optional[str], process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return tuple(handles.synchronize(handles.grouped_allgather_async(tensors, name, process_set, True)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        process_set = ctx.process_set
        how = _How(ReduceOp.AVERAGE, None, 1.0, 1.0, process_set)
        averaged = _Allreduce.apply(how, *gradients)
        counts = torch.tensor([ctx.rows], dtype=torch.int64)
        before = allgather(counts, process_set=process_set)[: process_set.rank()].sum(0).tolist()
        own = [part.narrow(0, start, rows) for part, start, rows in zip(averaged, before, ctx.rows)]
        return (None, None, *own)


class _Broadcast(torch.autograd.Function):
    """The root's tensor gets the averaged gradient; the others' were not used."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: Optional[str], process_set: ProcessSet
    ) -> Any:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        return handles.synchronize(handles.broadcast_async(tensor, root_rank, name, process_set, True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        averaged = allreduce(gradients[0], op=ReduceOp.AVERAGE, process_set=ctx.process_set)
        own = averaged if api.rank() == ctx.root_rank else torch.zeros_like(averaged)
        return own, None, None, None


class _Alltoall(torch.autograd.Function):
    """Gradients go back the way that the rows came."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: Optional[str], process_set: ProcessSet
    ) -> Any:
        rows, received = handles.synchronize(handles.alltoall_async(tensor, splits, name, process_set, True))
        ctx.received = received.cpu()
        ctx.process_set = process_set
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        returned, _ = _Alltoall.apply(gradients[0], ctx.received, None, ctx.process_set)
        return returned, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor of the same shape and type from every rank; every rank gets the result.

    Args:
        average: deprecated; use ``op``.
        name: what the operation is called; ranks' operations of one name belong together, those without
            a name by their order.
        compression: how the tensor travels.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies every contribution before, ``postscale_factor`` the result after.
        process_set: the ranks that take part.

    Returns:
        a new tensor, bit-identical on all ranks, through which gradients flow.
    """
    how = _How(reduction(op, average), name, prescale_factor, postscale_factor, process_set)
    compressed, context = compression.compress(tensor)
    (reduced,) = _Allreduce.apply(how, compressed)
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


def allreduce_(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Like :func:`allreduce`, overwriting the tensor; gradients do not flow through it."""
    handle = handles.allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, True
    )
    result: torch.Tensor = handles.synchronize(handle)
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> List[torch.Tensor]:
    """Like :func:`allreduce` for several tensors, all of them or none."""
    how = _How(reduction(op, average), name, prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _Allreduce.apply(how, *(compressed for compressed, _ in pairs))
    return [compression.decompress(item, context) for item, (_, context) in zip(reduced, pairs)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[ReduceOp] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> List[torch.Tensor]:
    """Like :func:`grouped_allreduce`, overwriting the tensors; gradients do not flow through it."""
    handle = handles.grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set, True
    )
    results: List[torch.Tensor] = handles.synchronize(handle)
    return results


def reducescatter(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Like :func:`allreduce`, but every rank gets only its rows: the first ranks one more if uneven."""
    (result,) = grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return result


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> List[torch.Tensor]:
    """Like :func:`reducescatter` for several tensors, all of them or none."""
    how = _How(op_of(op), name, prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    parts = _Reducescatter.apply(how, *(compressed for compressed, _ in pairs))
    return [compression.decompress(part, context) for part, (_, context) in zip(parts, pairs)]


def allgather(
    tensor: torch.Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Every rank's rows below each other, in rank order; how many may differ from rank to rank."""
    (result,) = grouped_allgather([tensor], name, process_set)
    return result


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> List[torch.Tensor]:
    """Like :func:`allgather` for several tensors, all of them or none."""
    return list(_Allgather.apply(name, process_set, *tensors))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The root's tensor, on every rank, as a new one. All pass a tensor of the same shape and type.

    Args:
        root_rank: a rank of the job, also if only a process set takes part.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor on every rank with the root's."""
    result: torch.Tensor = handles.synchronize(
        handles.broadcast_async_(tensor, root_rank, name, process_set, True)
    )
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank and receive rows from every rank.

    Args:
        splits: how many rows go to each rank, in rank order; without it they are dealt out evenly.

    Returns:
        the received rows in rank order; with ``splits``, a pair of them and of how many came from each.
    """
    rows, received = _Alltoall.apply(tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called it."""
    api.context().engine.barrier("", number_of(process_set)).wait()


def join(device: int = -1) -> int:
    """Say that this rank has run out of data, and wait until all have.

    Until then it contributes zeros to the others' allreduces (an average is still over all ranks).

    Args:
        device: ignored; there for Horovod's scripts.

    Returns:
        the rank that joined last, whose state is the newest.
    """
    last: int = api.context().engine.join().wait()
    return last
