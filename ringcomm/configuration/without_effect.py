"""Settings for optimizers that no part of this program has read: they had no effect."""

from __future__ import annotations

from typing import List, Set, Tuple

from .settings import Settings

# of this process: an optimizer outlives the view of an elastic job in which it was made
_used: Set[str] = set()


def use(name: str) -> None:
    """Record that an optimizer follows a setting."""
    _used.add(name)


def without_effect(settings: Settings) -> List[Tuple[str, str]]:
    """Return topics and lines about settings without effect, for the end of a job."""
    found: List[Tuple[str, str]] = []
    if settings.compression not in ("", "none") and "compression" not in _used:
        found.append((
            "no compression",
            f"--compress {settings.compression} had no effect: it is for ringcomm's optimizers and tapes "
            "(DistributedOptimizer, …) that name no compression themselves, and this program has made none. "
            "DDP takes it from ringcomm.torch.distributed.compress_hook(…).",
        ))  # fmt: skip
    if settings.local_steps and "local_steps" not in _used:
        found.append((
            "no local steps",
            f"--local-steps {settings.local_steps} had no effect: it is for PyTorch's DistributedOptimizer "
            "of ringcomm, and this program has made none. LocalSGD makes local steps in any loop.",
        ))  # fmt: skip
    return found
