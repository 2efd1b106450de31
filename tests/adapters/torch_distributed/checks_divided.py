"""Models divided among ranks, by layers or by tensors: the same numbers as one process."""

from __future__ import annotations

from typing import Dict, List

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from tests.adapters.torch_distributed.harness import Ranks

WIDTH, WORDS = 12, 29
"""``WIDTH`` can be divided by 2, 3 and 4 ranks; ``WORDS`` by none, so that its shards are uneven."""
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


def batch(rows: int) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def same_gradients(found: Dict[int, nn.Module], stages: int, rows: int) -> None:
    """The stages have those of a model of all stages in one process."""
    model = nn.Sequential(*(Block(number) for number in range(stages)))
    inputs, targets = batch(rows)
    nn.functional.mse_loss(model(inputs), targets).backward()
    for number, block in found.items():
        for mine, wanted in zip(block.parameters(), model[number].parameters()):
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-9, atol=1e-12)


def check_pipelines(on: Ranks) -> None:
    """One stage per rank; two, one after the other round all ranks; two, to the last rank and back."""
    one, looped, in_a_v = [on.rank], [on.rank, on.rank + on.size], [on.rank, 2 * on.size - 1 - on.rank]
    for schedule, numbers, microbatches, example in (
        (ScheduleGPipe, one, 4, None),  # the stages find their inputs' shapes
        (ScheduleGPipe, one, 5, torch.empty(2, WIDTH, dtype=torch.float64)),
        (Schedule1F1B, one, 2 * on.size + 1, None),
        (ScheduleInterleaved1F1B, looped, 2 * on.size, None),
        (ScheduleLoopedBFS, looped, 2 * on.size, None),
        (ScheduleInterleavedZeroBubble, looped, 2 * on.size, None),
        (ScheduleZBVZeroBubble, in_a_v, 2 * on.size, None),
        (ScheduleDualPipeV, in_a_v, 2 * on.size, None),
    ):
        count = len(numbers) * on.size
        blocks = {number: Block(number) for number in numbers}
        stages = [
            PipelineStage(block, number, count, CPU, input_args=example, group=on.ring)
            for number, block in blocks.items()
        ]
        given = stages[0] if len(stages) == 1 else stages
        made = schedule(given, microbatches, loss_fn=nn.functional.mse_loss)
        inputs, targets = batch(2 * microbatches)
        given = [inputs] if 0 in numbers else []
        made.step(*given, **({"target": targets} if count - 1 in numbers else {}))
        same_gradients(blocks, count, 2 * microbatches)


class Characters(nn.Module):
    """Embedding, a layer, and scores of the next character."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def check_tensor_parallel_training(on: Ranks) -> None:
    """Columns, rows, an embedding whose 29 rows no number of ranks divides, and a divided loss."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }  # fmt: skip
    alone = Characters()
    model = parallelize_module(Characters(), init_device_mesh("cpu", (on.size,)), plan)
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, alone)]
    for step in range(3):
        words = torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(step))
        losses = []
        for network, optimizer in zip((model, alone), optimizers):
            optimizer.zero_grad()
            with loss_parallel():
                scores = network(words[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(scores, words[:, 1:].flatten())
                loss.backward()
            optimizer.step()
            losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        assert torch.allclose(losses[0], losses[1], rtol=1e-9), (step, losses)
    for (name, found), expected in zip(model.named_parameters(), alone.parameters()):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.allclose(whole, expected, rtol=1e-9, atol=1e-11), (name, (whole - expected).abs().max())
