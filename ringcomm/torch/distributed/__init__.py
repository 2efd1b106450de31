"""The backend ``"ringcomm"`` for ``torch.distributed``, for example for DDP and FSDP, over TCP.

    import ringcomm.torch.distributed
    torch.distributed.init_process_group("ringcomm")

For trainers that make a process group themselves, use :func:`init` instead.

This import registers the backend. It also registers two rendezvous methods for processes of ``ringrun``:
``init_method="ringcomm://"``, and PyTorch's default method if its environment variables are not set.
"""

from __future__ import annotations

import re as _re
import sys as _sys

import torch as _torch
import torch.distributed as _dist


def _check(version: str) -> None:
    """Raise ImportError if PyTorch is too old, before modules are imported that need a newer one."""
    if tuple(int(part) for part in _re.findall(r"\d+", version)[:2]) < (2, 4):
        raise ImportError(
            f"ringcomm.torch.distributed needs PyTorch 2.4 or later; this is {version}. Update it "
            f"({_sys.executable} -m pip install -U torch), or train with ringcomm.torch, which works from "
            "PyTorch 2.0 on."
        )


_check(_torch.__version__)

# isort: split
from ._group import (  # noqa: E402
    BACKEND,
    ProcessGroupRingcomm,
    create,
    init,
    local_rank,
    make_default,
    monitored_barrier,
)
from ._hooks import WeightedAverage, compress_hook, weighted_average_hook  # noqa: E402
from ._operations import register_functional as _register_functional  # noqa: E402
from ._rendezvous import register  # noqa: E402

__all__ = [
    "BACKEND", "ProcessGroupRingcomm", "WeightedAverage", "compress_hook", "init",
    "local_rank", "make_default", "monitored_barrier", "weighted_average_hook",
]  # fmt: skip

if BACKEND not in _dist.Backend.backend_list:
    # PyTorch's ShardedTensor takes any device but the CPU for the one to use, even if there is none.
    _devices = ["cpu", *(["cuda"] if _torch.cuda.device_count() else [])]
    _dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=_devices)
    register()
    _register_functional()
