"""The collectives on tensors, under the name of Horovod's module.

Asynchronous functions return a handle, and ``synchronize(handle)`` returns the result. Functions without a
trailing underscore copy their input before they return, so you may change it at once, except with ``urgent``.
Functions with a trailing underscore overwrite your tensor. Gradients flow through synchronous functions that
return new tensors.

CPU tensors are sent from their own memory. CUDA tensors are copied to and from page-locked memory, and no
thread waits for these copies. Tensors on other devices are copied while the caller waits.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
import torch

from .. import api
from .._adapter.basics import *  # noqa: F403
from .._adapter.basics import HorovodBasics
from .._adapter.graph_callbacks import CompressionState, Operation
from .._adapter.reduction import Reduction, is_coded
from .._adapter.submit import (
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from ..arrays.kinds import device_kind
from ..arrays.operands import Operand, submitted
from ..arrays.torch_tensors import NO_VALUES, TensorOperand, not_dense, tensor_of
from ..calls.process_set import ProcessSet, global_process_set, rank_in, size_of
from ..collective.observe import look_through
from ..collective.options import Options, takes
from ..docstrings import documented
from ..engine.request import Handle
from ..errors import ConfigError
from ..ops import ReduceOp, op_of, weight_of

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "poll", "reducescatter", "reducescatter_async",
    "sparse_allreduce_async", "synchronize",
]  # fmt: skip

look_through(torch)

Tensors = Sequence[torch.Tensor]
_basics = HorovodBasics()


def dense(tensor: Any, what: str) -> torch.Tensor:
    """Return the tensor; ConfigError if it is not a tensor, not dense, or without values."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(
            f"{what} works on tensors, not on {type(tensor).__name__} ({tensor!r:.40}); use "
            "torch.as_tensor()."
        )
    other = not_dense(tensor)
    if other:
        more = " Or use sparse_allreduce_async()." if tensor.layout is torch.sparse_coo else ""
        raise ConfigError(f"{what} works on dense tensors, not on {other}{more}")
    if tensor.is_meta:
        raise ConfigError(f"{what}: a tensor of shape {tuple(tensor.shape)} is {NO_VALUES}")
    return tensor


def operand_of(
    tensor: Any, what: str, in_place: bool = False, read: bool = True, rows: bool = False, waits: bool = False
) -> Operand:
    """Return a tensor as the argument of a collective of the engine, named ``what`` in errors. ``read``: the
    collective reads it on this rank. ``rows``: the result has other rows. ``waits`` (only with ``rows``): the
    caller waits for the result, so that a tensor of the CPU need not be copied.
    """
    if device_kind(dense(tensor, what)) is not None:
        return submitted(api.context().staging, tensor, what if in_place else "", read, rows)
    return TensorOperand(tensor, copied=not (in_place or waits))


# ---- asynchronous ------------------------------------------------------------------------------------------


@documented
def allgather_async(
    tensor: torch.Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:  # fmt: skip
    """Start concatenating every rank's tensor along the first dimension, in rank order.

    Args:
        {tensor_rows}
        {matching}
        {urgent}

    {tensor_handle}
    """
    operands = [operand_of(tensor, "allgather", rows=True, waits=urgent)]
    return start_allgather(operands, name, process_set, urgent, False)


@documented
def grouped_allgather_async(
    tensors: Tensors, name: Optional[str] = None, process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:  # fmt: skip
    """Start concatenating several tensors of every rank along the first dimension, in one operation.

    Args:
        {tensors_rows}
        {matching}
        {urgent}

    {tensor_handle}
    """
    operands = [operand_of(tensor, "allgather", rows=True, waits=urgent) for tensor in tensors]
    return start_allgather(operands, name, process_set, urgent, True)


@documented
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set, urgent: bool = False,
) -> Handle:  # fmt: skip
    """Start copying the root's tensor to a new tensor on every rank.

    Args:
        {tensor_in}
        {root_rank}
        {matching}
        {urgent}

    {tensor_handle}
    """
    operand = operand_of(tensor, "broadcast", read=api.rank() == root_rank)
    return start_broadcast([operand], root_rank, name, process_set, urgent)


@documented
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set, urgent: bool = False,
) -> Handle:  # fmt: skip
    """Start overwriting a tensor on every rank with the root's tensor.

    Args:
        {tensor_pending}
        {root_rank}
        {matching}
        {urgent}

    {tensor_handle}
    """
    operand = operand_of(tensor, "broadcast_", True, read=api.rank() == root_rank)
    return start_broadcast([operand], root_rank, name, process_set, urgent)


@documented
def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set, urgent: bool = False,
) -> Handle:  # fmt: skip
    """Start sending rows to every rank, and receiving rows from every rank.

    Args:
        {tensor_rows}
        {splits_tensor}
        {matching}
        {urgent}

    Returns:
        a handle; ``synchronize(handle)`` returns a pair: the received rows in rank order, and the number of
        rows from each rank (int32).

    {tensor_start_raises}
    """
    operand = operand_of(tensor, "alltoall", rows=True, waits=urgent)
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
    listed = splits.cpu() if isinstance(splits, torch.Tensor) else splits
    return start_alltoall(
        operand, listed, name, process_set, urgent, lambda counts: torch.from_numpy(counts).to(device)
    )


@takes("allreduce", "average name op prescale_factor postscale_factor process_set urgent weight", "core")
def allreduce_async(tensor: torch.Tensor, options: Options) -> Handle:
    """Start reducing a tensor of the same shape and dtype over all ranks.

    Example: ``handle = hvd.allreduce_async(gradient, name="layer1"); mean = hvd.synchronize(handle)``.

    Args:
        {tensor_in}
        {options}

    {tensor_handle}
    """
    return start_reduction([tensor], options, "allreduce", options.urgent, False)


@takes("allreduce", "average name op prescale_factor postscale_factor process_set urgent weight", "core")
def allreduce_async_(tensor: torch.Tensor, options: Options) -> Handle:
    """Start reducing a tensor over all ranks in place.

    Args:
        {tensor_pending}
        {options}

    {tensor_handle}
    """
    return start_reduction([tensor], options, "allreduce_", options.urgent, False)


@takes("allreduce", "average name op prescale_factor postscale_factor process_set urgent weight", "core")
def grouped_allreduce_async(tensors: Tensors, options: Options) -> Handle:
    """Start reducing several tensors over all ranks in one operation: either all are reduced, or none.

    Args:
        {tensors_in}
        {options}

    {tensor_handle}
    """
    return start_reduction(tensors, options, "allreduce", options.urgent, True)


@takes("allreduce", "average name op prescale_factor postscale_factor process_set urgent weight", "core")
def grouped_allreduce_async_(tensors: Tensors, options: Options) -> Handle:
    """Start reducing several tensors in place, in one operation: either all are reduced, or none.

    Args:
        {tensors_pending}
        {options}

    {tensor_handle}
    """
    return start_reduction(tensors, options, "grouped_allreduce_", options.urgent, True)


def start_reduction(tensors: Tensors, options: Options, what: str, urgent: bool, grouped: bool) -> Handle:
    """Start an allreduce of copies of tensors, or of the tensors if ``what``, its name, ends in ``_``."""
    operands = [operand_of(tensor, what, what.endswith("_")) for tensor in tensors]
    return start_allreduce(operands, options, urgent, grouped)


@takes("reducescatter", "name op process_set prescale_factor postscale_factor urgent", "core")
def reducescatter_async(tensor: torch.Tensor, options: Options) -> Handle:
    """Start reducing a tensor over all ranks; every rank gets only its rows of the result.

    Args:
        {tensor_in}
        {options}

    {tensor_handle}
        NotOfferedError: op is Adasum.
    """
    return _start_rows([tensor], Reduction.of_rows(options), options, False)


@takes("reducescatter", "name op process_set prescale_factor postscale_factor urgent", "core")
def grouped_reducescatter_async(tensors: Tensors, options: Options) -> Handle:
    """Start reducing several tensors in one operation; every rank gets only its rows of each.

    Args:
        {tensors_in}
        {options}

    {tensor_handle}
        NotOfferedError: op is Adasum.
    """
    return _start_rows(tensors, Reduction.of_rows(options), options, True)


def _start_rows(tensors: Tensors, how: Reduction, options: Options, grouped: bool) -> Handle:
    """Start a reducescatter of tensors, with the name and the weight of ``options``."""
    operands = [operand_of(tensor, "reducescatter", rows=True) for tensor in tensors]
    called = how.call(options.name, options.weight, how.compression)
    return start_reducescatter(operands, called, options.urgent, grouped)


@documented
def sparse_allreduce_async(
    tensor: torch.Tensor, name: Optional[str] = None, op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """Start reducing a sparse (COO) tensor over all ranks: the entries of all ranks are concatenated.

    Args:
        tensor: a sparse COO tensor, of equal shape and dtype on all ranks.
        {name}
        op: ``Average`` (the default) or ``Sum``.
        {process_set}

    Returns:
        a handle. ``synchronize(handle)`` or ``handle()`` returns a new sparse tensor. Indices may occur
        several times in it; ``coalesce()`` adds their values.

    Raises:
        ConfigError: op is neither Average nor Sum.
        {start_errors}
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise ConfigError(
            f"sparse_allreduce_async works on sparse COO tensors, not on {kind}: use tensor.to_sparse(), or "
            "allreduce_async() for dense ones."
        )
    chosen = op_of(op)
    if chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ConfigError(f"sparse_allreduce_async has Average and Sum, not {chosen.name.capitalize()}.")
    parts = [tensor._indices().t().contiguous(), tensor._values()]
    handle = grouped_allgather_async(parts, name and f"{name}.sparse", process_set)

    def finish() -> torch.Tensor:
        indices, values = synchronize(handle)
        if chosen == ReduceOp.AVERAGE:
            values = values / size_of(process_set)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    return finish


def poll(handle: Any) -> bool:
    """Return whether an operation is done; :func:`synchronize` then does not wait.

    Args:
        handle: the handle of an asynchronous collective.

    Returns:
        True if the operation is done or has failed; always False for a sparse reduction.
    """
    return handle.done() if isinstance(handle, Handle) else False


@documented
def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its result, or raise its error.

    Args:
        handle: the handle of an asynchronous collective.

    Returns:
        the operation's result: a tensor, a list of tensors, or a pair. None if ``handle`` is not a handle.

    Raises:
        {rank_errors}
    """
    if isinstance(handle, Handle):
        return handle.wait()
    return handle() if callable(handle) else None


# ---- synchronous ------------------------------------------------------------------------------------------


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

    {tensor_call_raises}
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

    {tensor_call_raises}
    """
    return start_reduction([tensor], options, "allreduce_", True, False).wait()


@takes("allreduce", "average name compression op prescale_factor postscale_factor process_set")
def grouped_allreduce(tensors: Tensors, options: Options) -> List[torch.Tensor]:
    """Reduce several tensors over all ranks in one operation: either all are reduced, or none.

    Args:
        {tensors_in}
        {options}

    Returns:
        a list of new tensors, in order; gradients flow through them.

    {tensor_call_raises}
    """
    return _reduce(tensors, options)


def _reduce(tensors: Tensors, options: Options) -> List[torch.Tensor]:
    how, sent, restore = Reduction.of(options).prepared([dense(item, "allreduce") for item in tensors])
    return restore(_Allreduce.apply(how, options.name, options.weight, *sent))


@takes("allreduce", "average name op prescale_factor postscale_factor process_set weight", "core")
def grouped_allreduce_(tensors: Tensors, options: Options) -> List[torch.Tensor]:
    """Reduce several tensors in place, in one operation; gradients do not flow through them.

    Args:
        {tensors_inplace}
        {options}

    Returns:
        a list of the tensors themselves.

    {tensor_call_raises}
    """
    return start_reduction(tensors, options, "grouped_allreduce_", True, True).wait()


@takes("reducescatter", "name compression op process_set prescale_factor postscale_factor")
def reducescatter(tensor: torch.Tensor, options: Options) -> torch.Tensor:
    """Reduce a tensor over all ranks; every rank gets only its rows of the result.

    Args:
        {tensor_in}
        {options}

    Returns:
        a new tensor with this rank's rows. Every member of the set gets ``n // size`` of ``n`` rows; the
        first ``n % size`` members get one more. Gradients flow through it.

    {tensor_call_raises}
        ShapeError: the tensor has no first dimension.
    """
    return _scatter([tensor], options)[0]


@takes("reducescatter", "name compression op process_set prescale_factor postscale_factor")
def grouped_reducescatter(tensors: Tensors, options: Options) -> List[torch.Tensor]:
    """Reduce several tensors in one operation; every rank gets only its rows of each result.

    Args:
        {tensors_in}
        {options}

    Returns:
        a list of new tensors with this rank's rows; gradients flow through them.

    {tensor_call_raises}
        ShapeError: a tensor has no first dimension.
    """
    return _scatter(tensors, options)


def _scatter(tensors: Tensors, options: Options) -> List[torch.Tensor]:
    checked = [dense(tensor, "reducescatter") for tensor in tensors]
    how, sent, restore = Reduction.of_rows(options).prepared(checked)
    return restore(_Reducescatter.apply(how, options.name, options.weight, *sent))


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
        a new tensor with the rows of all ranks. The number of rows may differ between ranks. Gradients flow
        through it.

    {tensor_call_raises}
    """
    return grouped_allgather([tensor], name, process_set)[0]


@documented
def grouped_allgather(
    tensors: Tensors, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[torch.Tensor]:
    """Concatenate several tensors of every rank along the first dimension, in one operation.

    Args:
        {tensors_rows}
        {matching}

    Returns:
        a list of new tensors with the rows of all ranks, in rank order; gradients flow through them.

    {tensor_call_raises}
    """
    return list(_Allgather.apply(name, process_set, *(dense(item, "allgather") for item in tensors)))


@documented
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Copy the root's tensor to a new tensor on every rank.

    Args:
        {tensor_in}
        {root_rank}
        {matching}

    Returns:
        a new tensor with the root's elements. The gradient of the root's tensor is the average over all
        ranks; the gradients of the other ranks' tensors are zero.

    {tensor_call_raises}
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)


@documented
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Overwrite a tensor on every rank with the root's tensor; gradients do not flow through it.

    Args:
        {tensor_inplace}
        {root_rank}
        {matching}

    Returns:
        ``tensor`` itself.

    {tensor_call_raises}
    """
    return broadcast_async_(tensor, root_rank, name, process_set, True).wait()


@documented
def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Send rows to every rank, and receive rows from every rank.

    Args:
        {tensor_rows}
        {splits_tensor}
        {matching}

    Returns:
        the received rows in rank order. With ``splits``, a pair: the received rows, and the number of rows
        from each rank (int32). Gradients flow through the rows.

    {tensor_call_raises}
    """
    rows, received = _Alltoall.apply(tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


@documented
def join(device: int = -1) -> int:
    """Announce that this rank has no more data, and wait until all ranks have announced it.

    Until then this rank contributes zeros to the allreduces of the other ranks. An average still divides by
    the number of all ranks.

    Args:
        device: ignored. It exists for scripts that were written for Horovod.

    Returns:
        the rank that joined last. Its state is the newest.

    Raises:
        PeerLostError: a rank ended, or is silent for too long.
        {not_initialized}
    """
    return api.context().engine.join().wait()


# ---- the collectives as autograd functions: the forward pass and its gradient ------------------------------


def reduced(
    how: Reduction, name: Optional[str], tensors: Tensors, weight: Optional[float] = None,
    state: Optional[CompressionState] = None,
) -> Tuple[torch.Tensor, ...]:  # fmt: skip
    """Return reductions of tensors over all ranks, as one operation, without gradients."""
    if is_coded(how.compression):
        return _reduce_codes(Operation("allreduce", how, name, state=state), tensors, weight)
    return tuple(start_reduction(tensors, how.call(name, weight), "allreduce", True, True).wait())


def _reduce_codes(operation: Operation, tensors: Tensors, weight: Optional[float]) -> Tuple[Any, ...]:
    """Run a reduction whose compressor it executes itself, on copies in host memory."""
    operands = [TensorOperand(dense(tensor, "a reduction")) for tensor in tensors]
    arrays = [operand.flat.reshape(operand.shape) for operand in operands]
    if weight is not None:
        arrays.append(np.float64(weight_of(weight)))
    whole = operation._replace(inputs=len(arrays), has_weight=weight is not None)
    results = whole.start(arrays, urgent=True).wait()
    return tuple(tensor_of(result).to(tensor.device) for result, tensor in zip(results, tensors))


class _Allreduce(torch.autograd.Function):
    """Reduce tensors; the gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, how: Reduction, name: Optional[str], weight: Optional[float], *tensors: torch.Tensor
    ) -> Any:
        ctx.how, ctx.weight = how, weight
        return reduced(how, name, tensors, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        how, weight = ctx.how, ctx.weight
        if weight is None:
            return (None, None, None, *_Allreduce.apply(how, None, None, *gradients))
        # The derivative of a weighted average: the sum of the gradients, times this rank's share.
        own = torch.tensor([weight], dtype=torch.float64)
        plain = Reduction(ReduceOp.SUM, process_set=how.process_set)
        *sums, total = _Allreduce.apply(plain, None, None, *gradients, own)
        share = weight * how.factor / float(total)
        return (None, None, None, *(item * share for item in sums))


class _Reducescatter(torch.autograd.Function):
    """Reduce tensors and keep this rank's rows; the gradient gathers all rows, times the size for a sum."""

    @staticmethod
    def forward(
        ctx: Any, how: Reduction, name: Optional[str], weight: Optional[float], *tensors: torch.Tensor
    ) -> Any:
        ctx.how, ctx.weight = how, weight
        if is_coded(how.compression):
            return _reduce_codes(Operation("reducescatter", how, name), tensors, weight)
        return tuple(_start_rows(tensors, how, Options(name=name, weight=weight, urgent=True), True).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        how, weight, factor = ctx.how, ctx.weight, ctx.how.gathered_factor
        if weight is not None:  # this rank's, relative to the mean of the weights
            own = torch.tensor([weight], dtype=torch.float64)
            (mean,) = _Allreduce.apply(Reduction(process_set=how.process_set), None, None, own)
            factor *= weight / float(mean)
        gathered = _Allgather.apply(None, how.process_set, *gradients)
        return (None, None, None, *(gradient * factor for gradient in gathered))


class _Allgather(torch.autograd.Function):
    """Gather rows; the gradient is this rank's rows of the averaged gradients."""

    @staticmethod
    def forward(ctx: Any, name: Optional[str], process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return tuple(grouped_allgather_async(tensors, name, process_set, True).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        process_set = ctx.process_set
        averaged = _Allreduce.apply(Reduction(process_set=process_set), None, None, *gradients)
        (gathered,) = _Allgather.apply(None, process_set, torch.tensor([ctx.rows], dtype=torch.int64))
        before = gathered[: rank_in(process_set)].sum(0).tolist()
        own = [part.narrow(0, start, rows) for part, start, rows in zip(averaged, before, ctx.rows)]
        return (None, None, *own)


class _Broadcast(torch.autograd.Function):
    """Broadcast a tensor; the root's gradient is the averaged gradient, all others are zero."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: Optional[str], process_set: ProcessSet
    ) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return broadcast_async(tensor, root_rank, name, process_set, True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (averaged,) = _Allreduce.apply(Reduction(process_set=ctx.process_set), None, None, gradients[0])
        own = averaged if api.rank() == ctx.root_rank else torch.zeros_like(averaged)
        return own, None, None, None


class _Alltoall(torch.autograd.Function):
    """Exchange rows; the gradient sends each row's gradient back to the rank that it came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: Optional[str], process_set: ProcessSet
    ) -> Any:
        rows, received = alltoall_async(tensor, splits, name, process_set, True).wait()
        ctx.received, ctx.process_set = received.cpu(), process_set
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        returned, _ = _Alltoall.apply(gradients[0], ctx.received, None, ctx.process_set)
        return returned, None, None, None
