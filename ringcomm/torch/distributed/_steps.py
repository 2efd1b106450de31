"""Count the steps of PyTorch's optimizers, for ``ringrun --watch`` and ``ringrun --report``."""

from __future__ import annotations

from typing import Any

from torch.optim import optimizer as torch_optimizer

from ...clock import StepClock

_steps = StepClock()
_registered = False


def optimizer_steps() -> StepClock:
    """Return the counter of this process's optimizer steps; it counts from the first call on."""
    global _registered
    if not _registered:
        _registered = True
        torch_optimizer.register_optimizer_step_post_hook(_stepped)
    return _steps


def _stepped(optimizer: Any, *_: Any) -> None:
    _steps.add(id(optimizer))
