"""Synchronous collectives on tensors. Gradients flow through those that return new tensors."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch

from .. import api
from .._adapter.reduction import Reduction
from ..calls.process_set import ProcessSet, global_process_set
from ..collective.options import Options, takes
from ..docstrings import documented
from . import handles
from .autograd import Allgather, Allreduce, Alltoall, Broadcast, Reducescatter
from .tensors import all_dense


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
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
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
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
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
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
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
    tensor: torch.Tensor,
    splits: Any = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
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
