"""Asynchronous collectives on tensors: they return a handle, and ``synchronize(handle)`` returns the result.

Functions without a trailing underscore copy their input before they return, so the caller may change it at
once (except with ``urgent``: then the caller waits). Functions with one overwrite the caller's own tensor.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Union

import torch

from .. import api
from .._adapter.reduction import Reduction
from .._adapter.submit import (
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from ..calls.process_set import ProcessSet, global_process_set, size_of
from ..collective.observe import look_through
from ..collective.options import Options, takes
from ..docstrings import documented
from ..engine.request import Handle
from ..errors import ConfigError
from ..ops import ReduceOp, op_of
from .tensors import operand_of

__all__ = [
    "AnyHandle", "Handle", "allgather_async", "allreduce_async", "allreduce_async_", "alltoall_async",
    "broadcast_async", "broadcast_async_", "grouped_allgather_async", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter_async", "poll", "reducescatter_async",
    "sparse_allreduce_async", "synchronize",
]  # fmt: skip

look_through(torch)

AnyHandle = Union[Handle, Callable[[], Any]]


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

    Returns:
        a handle; ``synchronize(handle)`` returns a new tensor. The number of rows may differ from rank to
        rank.

    Raises:
        ConfigError: it is not a dense tensor.
        {start_errors}
    """
    operands = [operand_of(tensor, "allgather", rows=True, waits=urgent)]
    return start_allgather(operands, name, process_set, urgent, False)


@documented
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: Optional[str] = None, process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:  # fmt: skip
    """Start concatenating several tensors of every rank along the first dimension, as one operation.

    Args:
        {tensors_rows}
        {matching}
        {urgent}

    Returns:
        a handle; ``synchronize(handle)`` returns a list of new tensors.

    Raises:
        ConfigError: it is not a dense tensor.
        {start_errors}
    """
    operands = [operand_of(tensor, "allgather", rows=True, waits=urgent) for tensor in tensors]
    return start_allgather(operands, name, process_set, urgent, True)


@documented
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set, urgent: bool = False,
) -> Handle:  # fmt: skip
    """Start copying the root's tensor to every rank, as a new tensor.

    Args:
        {tensor_in}
        {root_rank}
        {matching}
        {urgent}

    Returns:
        a handle; ``synchronize(handle)`` returns a new tensor with the root's elements.

    Raises:
        ConfigError: it is not a dense tensor.
        {start_errors}
    """
    operand = operand_of(tensor, "broadcast", read=api.rank() == root_rank)
    return start_broadcast([operand], root_rank, name, process_set, urgent)


@documented
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set, urgent: bool = False,
) -> Handle:  # fmt: skip
    """Start overwriting a tensor on every rank with the root's.

    Args:
        {tensor_pending}
        {root_rank}
        {matching}
        {urgent}

    Returns:
        a handle; ``synchronize(handle)`` returns ``tensor`` itself.

    Raises:
        ConfigError: it is not a dense tensor.
        {start_errors}
    """
    operand = operand_of(tensor, "broadcast_", True, read=api.rank() == root_rank)
    return start_broadcast([operand], root_rank, name, process_set, urgent)


@documented
def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set, urgent: bool = False,
) -> Handle:  # fmt: skip
    """Start sending a part of the rows to every rank, and receiving a part of the rows of every rank.

    Args:
        {tensor_rows}
        {splits_tensor}
        {matching}
        {urgent}

    Returns:
        a handle; ``synchronize(handle)`` returns a pair: the received rows in rank order, and the number of
        rows from each rank (int32).

    Raises:
        ConfigError: it is not a dense tensor, or the splits do not fit it.
        {start_errors}
    """
    operand = operand_of(tensor, "alltoall", rows=True, waits=urgent)

    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
    listed = splits.cpu() if isinstance(splits, torch.Tensor) else splits

    def counted(received: Any) -> torch.Tensor:
        return torch.from_numpy(received).to(device)

    return start_alltoall(operand, listed, name, process_set, urgent, counted)


@takes("allreduce", "average name op prescale_factor postscale_factor process_set urgent weight", "core")
def allreduce_async(tensor: torch.Tensor, options: Options) -> Handle:
    """Start reducing a tensor of the same shape and dtype over all ranks.

    Example: ``handle = hvd.allreduce_async(gradient, name="layer1"); mean = hvd.synchronize(handle)``.

    Args:
        {tensor_in}
        {options}

    Returns:
        a handle; ``synchronize(handle)`` returns a new tensor of the same shape, dtype and device.

    Raises:
        ConfigError: it is not a dense tensor, or ``average`` and ``op`` are both given.
        {start_errors}
    """
    return start_reduction([tensor], options, "allreduce", options.urgent, False)


@takes("allreduce", "average name op prescale_factor postscale_factor process_set urgent weight", "core")
def allreduce_async_(tensor: torch.Tensor, options: Options) -> Handle:
    """Start reducing a tensor over all ranks in place.

    Args:
        {tensor_pending}
        {options}

    Returns:
        a handle; ``synchronize(handle)`` returns ``tensor`` itself.

    Raises:
        ConfigError: it is not a dense tensor, or ``average`` and ``op`` are both given.
        {start_errors}
    """
    return start_reduction([tensor], options, "allreduce_", options.urgent, False)


@takes("allreduce", "average name op prescale_factor postscale_factor process_set urgent weight", "core")
def grouped_allreduce_async(tensors: Sequence[torch.Tensor], options: Options) -> Handle:
    """Start reducing several tensors over all ranks as one operation: all are reduced, or none.

    Args:
        {tensors_in}
        {options}

    Returns:
        a handle; ``synchronize(handle)`` returns a list of new tensors.

    Raises:
        ConfigError: it is not a dense tensor, or ``average`` and ``op`` are both given.
        {start_errors}
    """
    return start_reduction(tensors, options, "allreduce", options.urgent, True)


@takes("allreduce", "average name op prescale_factor postscale_factor process_set urgent weight", "core")
def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], options: Options) -> Handle:
    """Start reducing several tensors in place as one operation: all are reduced, or none.

    Args:
        {tensors_pending}
        {options}

    Returns:
        a handle; ``synchronize(handle)`` returns a list of the tensors themselves.

    Raises:
        ConfigError: it is not a dense tensor, or ``average`` and ``op`` are both given.
        {start_errors}
    """
    return start_reduction(tensors, options, "grouped_allreduce_", options.urgent, True)


def start_reduction(
    tensors: Sequence[torch.Tensor], options: Options, what: str, urgent: bool, grouped: bool
) -> Handle:
    """Start an allreduce of copies of tensors, or of the tensors if ``what``, its name, ends in ``_``."""
    operands = [operand_of(tensor, what, what.endswith("_")) for tensor in tensors]
    return start_allreduce(operands, options, urgent, grouped)


@takes("reducescatter", "name op process_set prescale_factor postscale_factor urgent", "core")
def reducescatter_async(tensor: torch.Tensor, options: Options) -> Handle:
    """Start reducing a tensor over all ranks; every rank gets only its rows of the result.

    Args:
        {tensor_in}
        {options}

    Returns:
        a handle; ``synchronize(handle)`` returns a new tensor with this rank's rows: of ``n`` rows every
        member of the set gets ``n // size``, the first ``n % size`` members one more.

    Raises:
        ConfigError: it is not a dense tensor.
        NotOfferedError: op is Adasum.
        {start_errors}
    """
    return start_rows([tensor], Reduction.of_rows(options), options, False)


@takes("reducescatter", "name op process_set prescale_factor postscale_factor urgent", "core")
def grouped_reducescatter_async(tensors: Sequence[torch.Tensor], options: Options) -> Handle:
    """Start reducing several tensors as one operation; every rank gets only its rows of each.

    Args:
        {tensors_in}
        {options}

    Returns:
        a handle; ``synchronize(handle)`` returns a list of new tensors with this rank's rows.

    Raises:
        ConfigError: it is not a dense tensor.
        NotOfferedError: op is Adasum.
        {start_errors}
    """
    return start_rows(tensors, Reduction.of_rows(options), options, True)


def start_rows(tensors: Sequence[torch.Tensor], how: Reduction, options: Options, grouped: bool) -> Handle:
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
        a handle; ``synchronize(handle)`` (or calling it) returns a new sparse tensor, in which indices may
        occur several times: ``coalesce()`` adds them.

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


def poll(handle: AnyHandle) -> bool:
    """Return whether an operation is done, so that :func:`synchronize` would not wait.

    Args:
        handle: from one of the asynchronous collectives.

    Returns:
        True if the operation is done or has failed; always False for a sparse reduction.
    """
    return handle.done() if isinstance(handle, Handle) else False


@documented
def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its result, or raise its error.

    Args:
        handle: from one of the asynchronous collectives.

    Returns:
        the operation's result: a tensor, a list of tensors, or a pair. None for another object.

    Raises:
        {rank_errors}
    """
    if isinstance(handle, Handle):
        return handle.wait()
    return handle() if callable(handle) else None
