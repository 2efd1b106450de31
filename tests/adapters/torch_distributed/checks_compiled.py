"""Programs compiled by ``torch.compile``, or traced: the same numbers over ringcomm as over Gloo."""

from __future__ import annotations

from typing import Any, Callable, List

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
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


def check_a_model_that_was_compiled_before_it_is_distributed(on: Ranks) -> None:
    def program(group: Any, backend: str) -> List[torch.Tensor]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))
        distributed = DDP(torch.compile(model, backend=backend), process_group=group)
        for step in range(3):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + on.rank))
            distributed(inputs).square().mean().backward()
        return [item.grad for item in model.parameters() if item.grad is not None]

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


def check_functional_collectives(on: Ranks) -> None:
    def program(group: Any, backend: str) -> List[torch.Tensor]:
        def compute(given: torch.Tensor) -> List[torch.Tensor]:
            total = functional.all_reduce(given + 1, "sum", group)
            gathered = functional.all_gather_tensor(given, 0, group)
            scattered = functional.reduce_scatter_tensor(gathered * (1 + on.rank), "sum", 0, group)
            return [total * 2, gathered + 1, scattered - 1]

        compiled = torch.compile(compute, backend=backend)
        given = torch.arange(2.0 * on.size) * (1 + on.rank)
        return [functional.wait_tensor(item) for _ in range(2) for item in compiled(given)]

    same_over_both(on, program)


def check_gradients_of_compiled_collectives(on: Ranks) -> None:
    def program(group: Any, backend: str) -> List[torch.Tensor]:
        def compute(part: torch.Tensor) -> torch.Tensor:
            gathered = functional.all_gather_tensor_autograd(part.sin(), 0, group)
            return functional.reduce_scatter_tensor_autograd(gathered * gathered, "sum", 0, group).sum()

        part = torch.arange(4.0).add_(on.rank).requires_grad_()
        run = torch.compile(compute, backend=backend)
        for _ in range(2):
            run(part).backward()
        return [part.grad]

    same_over_both(on, program)


class Layers(nn.Module):
    """A model that ``pipeline()`` divides."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def check_a_pipeline_of_a_traced_model(on: Ranks) -> None:
    split = {f"layers.{number}": SplitPoint.BEGINNING for number in range(1, on.size)}
    inputs, targets = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(9))
    whole = Layers(on.size)
    expected = whole(inputs)
    nn.functional.mse_loss(expected, targets).backward()
    pipe = pipeline(Layers(on.size), mb_args=(inputs[:2],), split_spec=split)
    stage = pipe.build_stage(on.rank, torch.device("cpu"), on.ring)
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    given = [inputs] if on.rank == 0 else []
    output = schedule.step(*given, **({"target": targets} if on.rank == on.size - 1 else {}))
    if on.rank == on.size - 1:
        torch.testing.assert_close(output, expected)
    for name, parameter in stage.submod.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)
