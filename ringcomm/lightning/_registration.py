"""Make the strategies for each used distribution of Lightning, and register their names."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Dict, List, NamedTuple, Set, Tuple

from ._job_ranks import JobRanks, RingcommEnvironment, shard


class Distribution(NamedTuple):
    """A distribution of Lightning: its top-level package, and the packages of Fabric and the Trainer."""

    package: str
    fabric: str
    trainer: str


DISTRIBUTIONS = (
    Distribution("lightning", "lightning.fabric", "lightning.pytorch"),
    Distribution("pytorch_lightning", "lightning_fabric", "pytorch_lightning"),
)
DDP: Tuple[Tuple[str, Dict[str, Any]], ...] = (
    ("ddp_ringcomm", {}),
    ("ddp_ringcomm_find_unused_parameters_true", {"find_unused_parameters": True}),
)
FSDP2 = "fsdp2_ringcomm"
_registered: Set[str] = set()


def register() -> List[str]:
    """Register the strategies with each distribution of Lightning that is imported, or else installed.

    ``"ddp_ringcomm"``, ``"ddp_ringcomm_find_unused_parameters_true"`` and ``"fsdp2_ringcomm"`` can then be
    given to ``Trainer`` and ``Fabric``. Importing ``ringcomm.lightning`` calls it; call it again after
    importing another distribution.

    Returns:
        the packages, ``"lightning"`` or ``"pytorch_lightning"`` or both.

    Raises:
        ImportError: neither is installed.
    """
    found = [item for item in DISTRIBUTIONS if item.package in sys.modules]
    found = found or [item for item in DISTRIBUTIONS if find_spec(item.package) is not None]
    if not found:
        raise ImportError(
            "ringcomm.lightning needs PyTorch Lightning, which is not installed here. Install it: "
            f"{sys.executable} -m pip install lightning"
        )
    for item in found:
        if item.package not in _registered:
            _register(item)
            _registered.add(item.package)
    return [item.package for item in found]


def _register(distribution: Distribution) -> None:
    environments = import_module(f"{distribution.fabric}.plugins.environments")
    environments.ClusterEnvironment.register(RingcommEnvironment)
    fabric = import_module(f"{distribution.fabric}.strategies")
    trainer = import_module(f"{distribution.trainer}.strategies")
    for strategies, registry, sharding in (
        (fabric, fabric.STRATEGY_REGISTRY, {"parallelize_fn": shard}),
        (trainer, trainer.StrategyRegistry, {}),
    ):
        ddp = _strategy(strategies.DDPStrategy)
        for name, options in DDP:
            registry.register(name, ddp, description="DDP over ringcomm", **options)
        if hasattr(strategies, "ModelParallelStrategy"):  # Lightning 2.3 and newer have it
            fsdp2 = _strategy(strategies.ModelParallelStrategy)
            registry.register(FSDP2, fsdp2, description="FSDP2 over ringcomm", **sharding)


def _strategy(base: type) -> type:
    """Return a strategy of Lightning's with the ranks of the job."""
    return type(f"Ringcomm{base.__name__}", (JobRanks, base), {"__doc__": JobRanks.__doc__})
