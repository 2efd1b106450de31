"""Check the arguments that PyTorch gives a process group."""

from __future__ import annotations

import operator
from typing import Any, List, Sequence, Tuple

import torch
import torch.distributed as dist

from ...errors import Misuse
from ...group.message_matching import Address
from ._collectives import Tensors
from ._reductions import GroupReduction

_USERS = 0


def single(tensors: Any) -> torch.Tensor:
    """Return the tensor of a list of one; Misuse if the list has another length."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise Misuse(f"one tensor at a time, not {len(tensors)}.")
    return tensors[0]


def address_of(tag: int) -> Address:
    """Return the address of messages with a user's tag; Misuse if the tag is invalid."""
    if not -(1 << 31) <= tag < 1 << 31:
        raise Misuse(f"tag={tag}: tags are whole numbers of 32 bits, from -2**31 to 2**31 - 1.")
    return _USERS, operator.index(tag)


def pairs_of(outputs: Sequence[Any], inputs: Tensors) -> List[Tuple[Any, torch.Tensor]]:
    """Return each output with its input; Misuse if their numbers differ."""
    if len(outputs) != len(inputs):
        raise Misuse(f"{len(inputs)} inputs need as many outputs, not {len(outputs)}.")
    return list(zip(outputs, inputs))


def reduction_of(opts: Any) -> GroupReduction:
    """Return the reduction that PyTorch's options name; a sum without options."""
    return GroupReduction.of(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)


def root_of(opts: Any) -> int:
    """Return the root's rank in the group, from PyTorch's options."""
    return int(opts.rootRank) if opts is not None else 0
