"""A program that joins with ``init()``, and then does what its argument says.

python starts.py joins|alone|briefly|ddp|late|messages|functional|gloo
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import ringcomm.torch.distributed as backend
from ringcomm.errors import RingcommError

STEPS = {"alone": 12, "briefly": 3, "ddp": 12, "late": 12, "messages": 12}


def join() -> None:
    """Join twice; a group for which no backend is named is ringcomm's, too."""
    backend.init()
    first = dist.group.WORLD
    backend.init()
    assert dist.group.WORLD is first
    assert dist.get_backend() == "ringcomm"
    total = torch.ones(3)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {total.tolist()}", flush=True)
    dist.destroy_process_group()
    dist.init_process_group(init_method="ringcomm://")
    assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "ringcomm"
    dist.destroy_process_group()


def train(way: str) -> None:
    """Train, with or without anything that averages gradients."""
    backend.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    if way == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS[way]):
        if way == "late" and step == 5:
            dist.all_reduce(torch.ones(1))
        if way == "messages" and step == 5:
            exchange = dist.send if dist.get_rank() else dist.recv
            exchange(torch.ones(1), 1 - dist.get_rank())
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} has trained", flush=True)


def call_a_functional_collective() -> None:
    """Call one, which imports ``torch._dynamo`` while the backend's thread runs it."""
    backend.init()
    assert "torch._dynamo" not in sys.modules
    total = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 0
    assert "torch._dynamo" in sys.modules
    print(f"rank {dist.get_rank()} has {total.tolist()}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Do it, and print an error on one line."""
    way = sys.argv[1]
    warnings.simplefilter("always")
    try:
        if way == "gloo":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if way == "functional":
            call_a_functional_collective()
        else:
            join() if way in ("joins", "gloo") else train(way)
    except RingcommError as error:
        print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main()
