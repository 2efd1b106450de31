"""Pipelines of ``torch.distributed.pipelining``: the same gradients as one process without a pipeline."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from tests.adapters.torch_distributed.harness import Ranks

WIDTH = 12
CPU = torch.device("cpu")


class Block(nn.Module):
    """One stage; a residual connection keeps the gradients of a long pipeline large enough."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(100 + number)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def batch(rows: int, step: int = 0) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + step)
    return [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def reference(stages: int, rows: int, steps: int) -> List[List[torch.Tensor]]:
    """The parameters of every stage after training them in one process."""
    blocks = [Block(number) for number in range(stages)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = batch(rows, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [[item.detach() for item in block.parameters()] for block in blocks]


def train(
    on: Ranks, make: Callable[[Any, int], Any], numbers: Sequence[int], stages: int, microbatches: int,
    example: Optional[torch.Tensor] = None,
) -> None:  # fmt: skip
    """Train with a schedule (`make` gets one stage or a list) on the stages `numbers` of this rank, and
    compare. `example` is a stage's input; None: the stages find their inputs' shapes.
    """
    rows, steps = 2 * microbatches, 2
    blocks = [Block(number) for number in numbers]
    parts = [
        PipelineStage(block, number, stages, CPU, input_args=example, group=on.ring)
        for block, number in zip(blocks, numbers)
    ]
    schedule = make(parts[0] if len(parts) == 1 else parts, microbatches)
    optimizer = torch.optim.SGD([item for block in blocks for item in block.parameters()], lr=0.1)
    for step in range(steps):
        inputs, targets = batch(rows, step)
        losses: List[torch.Tensor] = []
        optimizer.zero_grad()
        mine = [inputs] if 0 in numbers else []
        if stages - 1 in numbers:
            schedule.step(*mine, target=targets, losses=losses)
            assert len(losses) == microbatches
        else:
            schedule.step(*mine)
        optimizer.step()
    wanted = reference(stages, rows, steps)
    for block, number in zip(blocks, numbers):
        for found, expected in zip(block.parameters(), wanted[number]):
            torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-12)


def with_loss(schedule: Any) -> Callable[[Any, int], Any]:
    return lambda stage, microbatches: schedule(stage, microbatches, loss_fn=nn.functional.mse_loss)


def looped(on: Ranks) -> List[int]:
    """Two stages per rank, one after the other round all ranks."""
    return [on.rank, on.rank + on.size]


def in_a_v(on: Ranks) -> List[int]:
    """Two stages per rank: to the last rank and back."""
    return [on.rank, 2 * on.size - 1 - on.rank]


def check_gpipe(on: Ranks) -> None:
    train(on, with_loss(ScheduleGPipe), [on.rank], on.size, 4)
    train(on, with_loss(ScheduleGPipe), [on.rank], on.size, 5, torch.empty(2, WIDTH, dtype=torch.float64))


def check_one_forward_one_backward(on: Ranks) -> None:
    for microbatches in (on.size, 2 * on.size + 1):
        train(on, with_loss(Schedule1F1B), [on.rank], on.size, microbatches)


def check_interleaved(on: Ranks) -> None:
    train(on, with_loss(ScheduleInterleaved1F1B), looped(on), 2 * on.size, 2 * on.size)
    train(on, with_loss(ScheduleLoopedBFS), looped(on), 2 * on.size, 2 * on.size)


def check_zero_bubble(on: Ranks) -> None:
    train(on, with_loss(ScheduleInterleavedZeroBubble), looped(on), 2 * on.size, 2 * on.size)
    train(on, with_loss(ScheduleZBVZeroBubble), in_a_v(on), 2 * on.size, 2 * on.size)


def check_dual_pipe(on: Ranks) -> None:
    train(on, with_loss(ScheduleDualPipeV), in_a_v(on), 2 * on.size, 2 * on.size)


def check_inference(on: Ranks) -> None:
    """``eval()`` sends the activations and no gradients."""
    stage = PipelineStage(Block(on.rank), on.rank, on.size, CPU, group=on.ring)
    schedule = ScheduleGPipe(stage, 3)
    inputs, _ = batch(6)
    with torch.no_grad():
        output = schedule.eval(*([inputs] if on.rank == 0 else []))
    if on.rank == on.size - 1:
        wanted = nn.Sequential(*(Block(number) for number in range(on.size)))(inputs)
        torch.testing.assert_close(output, wanted)


def check_a_pipeline_of_replicas(on: Ranks) -> None:
    """Two pipelines side by side, whose stages average their gradients with DistributedDataParallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    if on.size % 2:
        return
    mesh = init_device_mesh("cpu", (2, on.size // 2), mesh_dim_names=("copies", "stages"))
    copies, stages = mesh.get_group("copies"), mesh.get_group("stages")
    number, last = dist.get_rank(stages), on.size // 2 - 1
    block = DistributedDataParallel(Block(number), process_group=copies)
    stage = PipelineStage(block, number, last + 1, CPU, group=stages)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    inputs, targets = batch(16)
    mine = slice(8 * dist.get_rank(copies), 8 * dist.get_rank(copies) + 8)
    # All microbatches but the last one skip the averaging, which PyTorch's stage does itself.
    given = [inputs[mine]] if number == 0 else []
    schedule.step(*given, **({"target": targets[mine]} if number == last else {}))
    model = nn.Sequential(*(Block(index) for index in range(last + 1)))
    nn.functional.mse_loss(model(inputs), targets).backward()
    for found, expected in zip(block.parameters(), model[number].parameters()):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12)
