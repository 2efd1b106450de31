"""Programs compiled by ``torch.compile``, or traced: the same numbers over ringcomm as over Gloo."""

from __future__ import annotations

from typing import Any, Callable, List

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.adapters.torch_distributed.harness import Ranks

BACKENDS = ("eager", "aot_eager")


def same_over_both(on: Ranks, program: Callable[[Any, str], List[torch.Tensor]]) -> None:
    """The program gives the same over each group, compiled in each way."""
    for backend in BACKENDS:
        torch._dynamo.reset()
        over_gloo = program(on.gloo, backend)
        torch._dynamo.reset()
        for mine, wanted in zip(program(on.ring, backend), over_gloo):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def check_a_model_with_buffers(on: Ranks) -> None:
    """Its buffers are broadcast before each forward pass: a collective between compiled parts."""

    def program(group: Any, backend: str) -> List[torch.Tensor]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))
        compiled = torch.compile(DDP(model, process_group=group), backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + on.rank))
            compiled(inputs).square().mean().backward()
            optimizer.step()
        return [item.detach() for item in model.state_dict().values()]

    same_over_both(on, program)


def check_collectives_within_a_compiled_function(on: Ranks) -> None:
    def program(group: Any, backend: str) -> List[torch.Tensor]:
        def compute(given: torch.Tensor) -> List[torch.Tensor]:
            total = given * 2
            dist.all_reduce(total, group=group)
            gathered = torch.empty(on.size * given.numel())
            dist.all_gather_into_tensor(gathered, total + on.rank, group=group)
            return [total.sin(), gathered * 3]

        compiled = torch.compile(compute, backend=backend)
        return [item for step in range(3) for item in compiled(torch.arange(6.0) + on.rank + step)]

    same_over_both(on, program)
