"""What process groups in Python owe PyTorch's dispatcher and compiler.

One of the functional collectives calls the group from C++, and finds no method for it. Compiled programs
call it from C++ too (DDP's broadcast of buffers, functional collectives), and Dynamo would trace the methods
of a group in Python as if they were the user's, though it allows only a few members of groups ("Attempted to
access unregistered member on an OpaqueObject").
"""

from __future__ import annotations

import functools
import sys
from types import FunctionType
from typing import Any, Callable, List, TypeVar

import torch
import torch.distributed as dist

_library = torch.library.Library("_c10d_functional", "IMPL")


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


Class = TypeVar("Class", bound=type)

_DYNAMO = "torch._dynamo"
_prepare: List[Callable[[], None]] = []


def uncompiled(*others: str) -> Callable[[Class], Class]:
    """Return a class decorator: public methods, and ``others``, run outside of compiled code."""

    def decorate(cls: Class) -> Class:
        for name, item in list(vars(cls).items()):
            if isinstance(item, FunctionType) and (not name.startswith("_") or name in others):
                setattr(cls, name, _outside(item))
        return cls

    return decorate


def _dynamo_is_imported() -> bool:
    """Return whether Dynamo is imported, completely; it takes seconds, and without it nothing is compiled."""
    dynamo = sys.modules.get(_DYNAMO)
    return dynamo is not None and not getattr(dynamo.__spec__, "_initializing", False)


def _outside(method: Callable[..., Any]) -> Callable[..., Any]:
    disabled: List[Callable[..., Any]] = []

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if disabled:
            return disabled[0](*args, **kwargs)
        if _dynamo_is_imported():
            for prepare in _prepare:
                prepare()
            _prepare.clear()
        return (disabled[0] if disabled else method)(*args, **kwargs)

    _prepare.append(lambda: disabled.append(sys.modules[_DYNAMO].disable(method)))
    return call
