"""Strategies for PyTorch Lightning and Fabric, in the packages ``lightning`` and ``pytorch_lightning``.

    import ringcomm.lightning
    trainer = Trainer(strategy="ddp_ringcomm", accelerator="cpu")

Start the program with ``ringrun`` or ``torchrun``. The strategy ``"fsdp2_ringcomm"`` shards the model with
FSDP2. Both strategies use the number of ranks of the job, and hosts may have unequal numbers of ranks.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
import torch.distributed as dist

from .config import torchrun_from_environment
from .errors import Misuse
from .torch.distributed import BACKEND, init, local_rank

__all__ = ["RingcommEnvironment", "register"]


class RingcommEnvironment:
    """A ``ClusterEnvironment`` for Lightning and Fabric, with the ranks of the default process group.

    The constructor joins the job (:func:`ringcomm.torch.distributed.init`). For Lightning, every rank is a
    node with one device, so hosts may have unequal numbers of ranks. The strategies ``"ddp_ringcomm"`` and
    ``"fsdp2_ringcomm"`` use this class themselves. For another strategy, pass it as a plugin::

        environment = RingcommEnvironment()
        strategy = DDPStrategy(static_graph=True)
        Trainer(strategy=strategy, plugins=[environment], devices=1, num_nodes=environment.world_size())

    Then Lightning calls ``prepare_data`` on every rank, not on one rank per host.
    """

    def __init__(self) -> None:
        init()

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        """The address of rank 0. Lightning does not use it: the process group exists already."""
        return torchrun_from_environment(self.world_size())[1] or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Always 0; see :attr:`main_address`."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return whether the default process group exists and uses ringcomm."""
        return bool(dist.is_initialized() and dist.get_backend() == BACKEND)

    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        init()
        return int(dist.get_world_size())

    def set_world_size(self, size: int) -> None:
        """Does nothing: the number of ranks is fixed."""

    def global_rank(self) -> int:
        """Return this process's rank in the job."""
        init()
        return int(dist.get_rank())

    def set_global_rank(self, rank: int) -> None:
        """Join the job again if its process group has been destroyed. The argument is ignored."""
        init()

    def local_rank(self) -> int:
        """Always 0: every rank is a node of its own."""
        return 0

    def node_rank(self) -> int:
        """Return the rank: every rank is a node of its own."""
        return self.global_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse settings that do not describe this job.

        Raises:
            ValueError: there is not one device per node, or not one node per rank.
        """
        size = self.world_size()
        if (num_devices, num_nodes) != (1, size):
            raise ValueError(
                f"devices={num_devices} and num_nodes={num_nodes} do not describe this job: with "
                f"RingcommEnvironment every rank is a node, so write devices=1, num_nodes={size}."
            )

    def teardown(self) -> None:
        """Does nothing: the process group remains until the program ends."""


class JobRanks:
    """Mixin before a strategy of Lightning or Fabric: the ranks are those of the job. ``devices`` and
    ``num_nodes`` of the Trainer need not be given: each rank has one device, and the job its size.
    """

    _devices: Optional[List[Any]] = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._environment = RingcommEnvironment()
        super().__init__(*arguments, **{"process_group_backend": BACKEND, **options})
        self.cluster_environment = self._environment

    @property
    def parallel_devices(self) -> Optional[List[Any]]:
        """Return the one device of this rank, in a list; None until Lightning has chosen it."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Optional[List[Any]]) -> None:
        """Take the first device; raise if there are more than ranks."""
        size = self._environment.world_size()
        if devices and len(devices) > size:
            raise Misuse(
                f"devices={len(devices)}, but this job has {size} rank(s). Lightning does not start "
                f"processes with this strategy: start the program with ringrun -np {len(devices)}, or "
                "with torchrun."
            )
        self._devices = None if devices is None else devices[:1]

    @property
    def num_nodes(self) -> int:
        """Return the number of ranks: every rank is a node to Lightning."""
        return self._environment.world_size()

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        """Ignore the Trainer's number of nodes: the job has its size."""

    @property
    def root_device(self) -> torch.device:
        """Return the device of this rank."""
        assert self._devices is not None
        return self._devices[0]

    @property
    def local_rank(self) -> int:
        """Return this rank's number on its host; Lightning calls ``prepare_data`` where it is 0."""
        return local_rank()


def shard(model: Any, mesh: Any) -> Any:
    """Shard the parameters of a ``torch.nn.Module`` over all ranks with FSDP2; return the model.

    Each child with parameters is sharded first, and then the model.
    """
    from torch.distributed.fsdp import fully_shard  # not in PyTorch before 2.6

    ranks = mesh["data_parallel"]
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=ranks)
    fully_shard(model, mesh=ranks)
    return model


# By distribution of Lightning: the packages of Fabric and of the Trainer.
DISTRIBUTIONS = {
    "lightning": ("lightning.fabric", "lightning.pytorch"),
    "pytorch_lightning": ("lightning_fabric", "pytorch_lightning"),
}
DDP: Tuple[Tuple[str, Dict[str, Any]], ...] = (
    ("ddp_ringcomm", {}),
    ("ddp_ringcomm_find_unused_parameters_true", {"find_unused_parameters": True}),
)
_registered: Set[str] = set()


def register() -> List[str]:
    """Register the strategies with each imported package of Lightning, or with the installed ones.

    You can then pass ``"ddp_ringcomm"``, ``"ddp_ringcomm_find_unused_parameters_true"`` and
    ``"fsdp2_ringcomm"`` to ``Trainer`` and ``Fabric``. ``import ringcomm.lightning`` calls this function.
    Call it again after you have imported another package of Lightning.

    Returns:
        the packages, ``"lightning"`` or ``"pytorch_lightning"`` or both.

    Raises:
        ImportError: neither is installed.
    """
    found = [package for package in DISTRIBUTIONS if package in sys.modules]
    found = found or [package for package in DISTRIBUTIONS if find_spec(package) is not None]
    if not found:
        raise ImportError(
            "ringcomm.lightning needs PyTorch Lightning, which is not installed here. Install it: "
            f"{sys.executable} -m pip install lightning"
        )
    for package in found:
        if package not in _registered:
            _register(*DISTRIBUTIONS[package])
            _registered.add(package)
    return found


def _register(of_fabric: str, of_trainer: str) -> None:
    environments = import_module(f"{of_fabric}.plugins.environments")
    environments.ClusterEnvironment.register(RingcommEnvironment)
    fabric, trainer = import_module(f"{of_fabric}.strategies"), import_module(f"{of_trainer}.strategies")
    for strategies, registry, sharding in (
        (fabric, fabric.STRATEGY_REGISTRY, {"parallelize_fn": shard}),
        (trainer, trainer.StrategyRegistry, {}),
    ):
        ddp = _strategy(strategies.DDPStrategy)
        for name, options in DDP:
            registry.register(name, ddp, description="DDP over ringcomm", **options)
        if hasattr(strategies, "ModelParallelStrategy"):  # Lightning 2.3 and newer have it
            fsdp2 = _strategy(strategies.ModelParallelStrategy)
            registry.register("fsdp2_ringcomm", fsdp2, description="FSDP2 over ringcomm", **sharding)


def _strategy(base: type) -> type:
    return type(f"Ringcomm{base.__name__}", (JobRanks, base), {"__doc__": JobRanks.__doc__})


register()
