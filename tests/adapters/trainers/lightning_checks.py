"""What Lightning and Fabric have to do with the strategies of ``ringcomm.lightning``, on any number of ranks.

    ringrun -np 2 lightning_checks.py PACKAGE

PACKAGE is ``lightning.pytorch`` or ``pytorch_lightning``; Fabric is that of the same distribution.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, List

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

PACKAGE = sys.argv[1]
trainers: Any = importlib.import_module(PACKAGE)
FABRIC = "lightning.fabric" if PACKAGE.startswith("lightning.") else "lightning_fabric"
fabrics: Any = importlib.import_module(FABRIC)

import ringcomm.lightning  # noqa: E402 - after Lightning, as in a program of a user's
from ringcomm.errors import Misuse  # noqa: E402

SAMPLES = 24
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
         "enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1}  # fmt: skip


def layers() -> Any:
    """The same network on every rank."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def loader() -> Any:
    """Samples with their numbers."""
    samples = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(samples, torch.arange(SAMPLES)), batch_size=4)


class Model(trainers.LightningModule):
    """A network that notes which samples it has seen, and where ``prepare_data`` was called."""

    def __init__(self, sharded: bool = False) -> None:
        super().__init__()
        self.layers, self.sharded = layers(), sharded
        self.seen: List[int] = []
        self.prepared = 0

    def prepare_data(self) -> None:
        self.prepared += 1

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _: int) -> Any:
        self.seen += batch[1].tolist()
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def everywhere(value: Any) -> List[Any]:
    """The value of every rank."""
    found: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def whole(model: Any) -> List[Any]:
    """The weights, from all ranks if they are sharded; the same on all ranks."""
    weights = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in model.parameters()]
    found = [weight.detach().clone() for weight in weights]
    for other in everywhere(found):
        assert all(torch.equal(one, two) for one, two in zip(found, other))
    return found


def once(seen: List[int]) -> None:
    """Every sample was seen by one rank, once."""
    assert sorted(sum(everywhere(seen), [])) == list(range(SAMPLES))


def fit(strategy: Any, sharded: bool = False, **options: Any) -> List[Any]:
    """Train with the Trainer; the weights."""
    model = Model(sharded)
    trainer = trainers.Trainer(strategy=strategy, **QUIET, **options)
    trainer.fit(model, loader())
    assert trainer.world_size == dist.get_world_size() and trainer.global_rank == dist.get_rank()
    assert dist.get_backend() == "ringcomm"
    once(model.seen)
    if "plugins" not in options:
        assert sum(everywhere(model.prepared)) == 1  # all ranks are on one host
    return whole(model)


def with_fabric(strategy: str) -> List[Any]:
    """Train with Fabric; the weights."""
    fabric = fabrics.Fabric(strategy=strategy, accelerator="cpu")
    fabric.launch()
    network, seen = layers(), []
    model = fabric.setup_module(network)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    for samples, numbers in fabric.setup_dataloaders(loader()):
        seen += numbers.tolist()
        optimizer.zero_grad()
        fabric.backward(model(samples).square().mean())
        optimizer.step()
    once(seen)
    return whole(model)


def refused(what: Any, kind: type, words: str) -> None:
    """It raises an error of this kind with these words."""
    try:
        what()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    """All checks, in the same order on all ranks."""
    reference = fit("ddp_ringcomm")
    environment = ringcomm.lightning.RingcommEnvironment()
    size = environment.world_size()
    plain = trainers.strategies.DDPStrategy(static_graph=True)
    results = {
        "fsdp2": fit("fsdp2_ringcomm", sharded=True),
        "unused": fit("ddp_ringcomm_find_unused_parameters_true"),
        "plugin": fit(plain, plugins=[environment], devices=1, num_nodes=size),
        "plain ddp": fit("ddp", plugins=[environment], devices=1, num_nodes=size),
        "launcher's ranks": fit("ddp", devices=size),
    }
    for name, weights in results.items():
        assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(weights, reference)), name
    one, two = with_fabric("ddp_ringcomm"), with_fabric("fsdp2_ringcomm")
    assert all(torch.allclose(first, second, atol=1e-6) for first, second in zip(one, two))

    many = {"strategy": "ddp_ringcomm", "devices": size + 1}
    refused(lambda: trainers.Trainer(**many, **QUIET), Misuse, f"ringrun -np {size + 1}")
    refused(lambda: environment.validate_settings(2, 1), ValueError, f"devices=1, num_nodes={size}")
    assert environment.detect() and environment.creates_processes_externally
    dist.destroy_process_group()
    assert not environment.detect()
    fit("ddp_ringcomm")  # it joins again
    dist.barrier()
    dist.destroy_process_group()
    print("all is as it has to be", flush=True)


if __name__ == "__main__":
    main()
