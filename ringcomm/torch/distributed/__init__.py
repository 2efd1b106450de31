"""The backend ``"ringcomm"`` for ``torch.distributed``: DDP, FSDP and all that builds on them, over TCP.

    import ringcomm.torch.distributed
    torch.distributed.init_process_group("ringcomm")

or, for trainers that make a process group themselves, :func:`init`.

Importing this module registers the backend, and two rendezvous methods for processes started by ``ringrun``:
``init_method="ringcomm://"``, and PyTorch's default if its variables are not set.
"""

from __future__ import annotations

import torch as _torch
import torch.distributed as _dist

from . import _version  # noqa: F401 - first: it checks PyTorch's version

# isort: split
from . import _dispatch
from ._group import BACKEND, ProcessGroupRingcomm, create, monitored_barrier
from ._hooks import WeightedAverage, compress_hook, weighted_average_hook
from ._rendezvous import register
from ._start import init, local_rank, make_default

__all__ = [
    "BACKEND", "ProcessGroupRingcomm", "WeightedAverage", "compress_hook", "init",
    "local_rank", "make_default", "monitored_barrier", "weighted_average_hook",
]  # fmt: skip

if BACKEND not in _dist.Backend.backend_list:
    # PyTorch's ShardedTensor takes any device but the CPU for the one to use, even if there is none.
    _devices = ["cpu", *(["cuda"] if _torch.cuda.device_count() else [])]
    _dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=_devices)
    register()
    _dispatch.register()
