"""The backend ``"ringcomm"`` of ``torch.distributed`` in programs that do not import ringcomm.

PyTorch calls :func:`announce` when it is imported, as an entry point of the group ``torch.backends`` (from
PyTorch 2.5 on, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``). The entry point is in this package, because
importing ``ringcomm`` is too slow for users of PyTorch who may not use the backend.
"""

from __future__ import annotations

import importlib
from typing import Any

_ATTRIBUTE, _NAME = "RINGCOMM", "ringcomm"


class _Unused:
    """The attribute of ``torch.distributed.Backend`` in which PyTorch looks up the backend's name."""

    def __get__(self, instance: object, owner: Any) -> str:
        setattr(owner, _ATTRIBUTE, _NAME)
        importlib.import_module("ringcomm.torch.distributed")
        return _NAME


def announce() -> None:
    """Have ``ringcomm.torch.distributed`` imported when a program names the backend ``"ringcomm"``."""
    import torch.distributed as dist

    if dist.is_available() and _ATTRIBUTE not in vars(dist.Backend):
        setattr(dist.Backend, _ATTRIBUTE, _Unused())
