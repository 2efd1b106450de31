"""ringcomm on Ray: :class:`RayExecutor` as in Horovod, and configurations for Ray Train.

::

    from ringcomm.ray import RayExecutor
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)
    executor.start()
    results = executor.run(train)
    executor.shutdown()

With Ray Train: ``TorchTrainer(train, torch_config=TorchConfig())`` for process groups of PyTorch, and
``DataParallelTrainer(train, backend_config=RingcommConfig())`` for programs that call ``init()`` of ringcomm
or of one of its adapters. Ray starts, places and ends the processes; ringcomm connects them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .executor import MiniSettings, RayExecutor

if TYPE_CHECKING:
    from .torch_config import TorchConfig
    from .train import RingcommConfig

__all__ = ["MiniSettings", "RayExecutor", "RingcommConfig", "TorchConfig"]

# Names that need more than Ray's core, and their modules.
_FROM = {"RingcommConfig": ".train", "TorchConfig": ".torch_config"}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
