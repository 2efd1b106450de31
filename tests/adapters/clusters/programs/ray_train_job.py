"""Ray Train: a job of NumPy that loses a worker and is started again, and a group of PyTorch."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import functions
import numpy as np
import ray
from functions import write
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import ringcomm as rc
from ringcomm.ray import RingcommConfig, TorchConfig

FOLDER = Path(sys.argv[1]).parent


def numpy_loop(config: dict) -> list:
    """The first time rank 1 is killed; the others write down their error."""
    rc.init()
    marker = Path(config["marker"])
    try:
        for step in range(100):
            if rc.rank() == 1 and step == 3 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            rc.allreduce(np.ones(4))
    except rc.PeerLostError as error:
        Path(config["error"]).write_text(f"{error.rank}: {error}")
        raise
    return functions.describe(1.0)


def torch_loop() -> list:
    """Train a model with DistributedDataParallel."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(50):
        samples = torch.randn(32, 3)
        loss = ((model(samples) - samples.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    weights = [torch.zeros(1, 3) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.weight.detach())
    return [dist.get_backend(), losses[0], losses[-1], [item.tolist() for item in weights]]


def main() -> None:
    options = {"include_dashboard": False, "object_store_memory": 80_000_000, "log_to_driver": False}
    ray.init("local", num_cpus=4, **options)
    common = {"scaling_config": ScalingConfig(num_workers=2)}
    files = {"marker": str(FOLDER / "killed"), "error": str(FOLDER / "error")}
    trainer = DataParallelTrainer(
        numpy_loop, train_loop_config=files, backend_config=RingcommConfig(), **common,
        run_config=RunConfig(storage_path=str(FOLDER), failure_config=FailureConfig(max_failures=1)),
    )  # fmt: skip
    facts = {"numpy": trainer.fit().return_value, "error": (FOLDER / "error").read_text()}
    torch_trainer = TorchTrainer(
        torch_loop, torch_config=TorchConfig(), run_config=RunConfig(storage_path=str(FOLDER)), **common
    )
    facts["torch"] = torch_trainer.fit().return_value
    ray.shutdown()
    write(facts)


if __name__ == "__main__":
    main()
