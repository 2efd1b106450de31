"""Asynchronous collectives that move rows of tensors: allgather, broadcast and alltoall.

Functions without a trailing underscore copy their input before they return, so the caller may change it at
once (except with ``urgent``: then the caller waits). Functions with one overwrite the caller's own tensor.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from .. import api
from .._adapter.submit import start_allgather, start_alltoall, start_broadcast
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from ..engine.request import Handle
from .tensors import operand_of


@documented
def allgather_async(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
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
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
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
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
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
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
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
    tensor: torch.Tensor,
    splits: Any = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
    urgent: bool = False,
) -> Handle:
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
