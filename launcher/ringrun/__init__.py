"""ringrun: starts the ranks of a job on this and other hosts, monitors them, and ends all their processes.

:func:`announce` is an entry point of the group ``torch.backends``: PyTorch calls it when it is imported (from
2.5 on, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``). So this module imports nothing that is slow.
"""

from __future__ import annotations

import importlib
from typing import Any


class _Unused:
    """The attribute of ``torch.distributed.Backend`` in which PyTorch looks up the backend's name."""

    def __get__(self, instance: object, owner: Any) -> str:
        owner.RINGCOMM = "ringcomm"
        importlib.import_module("ringcomm.torch.distributed")
        return "ringcomm"


def announce() -> None:
    """Have ``ringcomm.torch.distributed`` imported when a program names the backend ``"ringcomm"``."""
    import torch.distributed as dist

    if dist.is_available() and "RINGCOMM" not in vars(dist.Backend):
        setattr(dist.Backend, "RINGCOMM", _Unused())  # noqa: B010  Backend does not declare it
