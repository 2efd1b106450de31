"""What every rank checks about buckets in memory that the ranks of a host share."""

from __future__ import annotations

import torch
from torch import nn

import ringcomm.torch as hvd
from ringcomm.transport import arena
from tests.adapters.torch.harness import same_everywhere


def check_large_buckets_lie_in_memory_that_the_host_shares() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(1000, 1200, bias=False, dtype=dtype)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
        )
        owner = arena.own()
        for step in range(3):
            optimizer.zero_grad()
            (model(torch.ones(1, 1000, dtype=dtype)).sum() * (hvd.rank() + step + 1.0)).backward()
            optimizer.step()
            gradient = model.weight.grad
            assert gradient is not None
            assert (gradient == (hvd.size() - 1) / 2 + step + 1.0).all()
            if owner is not None:
                found = owner.offset_of(gradient.data_ptr(), gradient.numel() * gradient.element_size())
                assert (found is not None) is (hvd.size() > 1)
        same_everywhere(model.weight)
