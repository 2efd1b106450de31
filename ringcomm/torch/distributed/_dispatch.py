"""Replace PyTorch's dispatcher, which process groups in Python bypass.

Calls of ``torch.distributed`` reach a group in Python without the dispatcher. So its modes do not see them,
and one of the functional collectives, which calls the group from C++, finds no method for it.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Names of PyTorch's operations: on one tensor each, on lists of tensors, on pairs of tensors.
_OPERATIONS = {
    "allgather": ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
    "alltoall": ("alltoall_base_", "alltoall_", ""),
}
_library = torch.library.Library("_c10d_functional", "IMPL")


def count_call(what: str, arguments: Sequence[Any]) -> None:
    """Count a collective with its tensors in each ``CommDebugMode`` that is active in this thread."""
    if not torch._C._len_torch_dispatch_stack():
        return
    name = f"{what}_"
    if what in _OPERATIONS:
        are_tensors = all(isinstance(item, torch.Tensor) for item in arguments[:2])
        name = _OPERATIONS[what][2 if len(arguments) == 1 else 0 if are_tensors else 1]
    for mode in _get_current_dispatch_mode_stack():
        counts, operation = getattr(mode, "comm_counts", None), getattr(torch.ops.c10d, name, None)
        if counts is not None and operation is not None:
            counts[operation] += 1


def _all_gather_out(source: torch.Tensor, size: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
    """Start ``all_gather_into_tensor_out`` of functional collectives, over a group of any backend."""
    found: Any = dist.distributed_c10d._resolve_process_group(group)
    torch._C._distributed_c10d._register_work(out, found._allgather_base(out, source))
    return out


def register() -> None:
    """Make the functional collective that gathers into a given tensor work over groups in Python."""
    if hasattr(torch.ops._c10d_functional, "all_gather_into_tensor_out"):
        for device in ("CPU", "CUDA"):
            _library.impl("all_gather_into_tensor_out", _all_gather_out, device)
