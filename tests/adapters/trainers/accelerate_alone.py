"""A program for Accelerate that forgets ``cpu=True``: every rank trains alone."""

from __future__ import annotations

import torch
from accelerate import Accelerator

import ringcomm.torch.distributed


def main() -> None:
    """Train a few steps."""
    ringcomm.torch.distributed.init()
    accelerator = Accelerator()
    layer = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for _ in range(12):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    print(f"{accelerator.num_processes} process(es)", flush=True)


if __name__ == "__main__":
    main()
