"""A stage of a pipeline is killed: every rank gets an error that names it. Each check needs its own ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ringcomm.errors import PeerLostError, RingcommError
from tests.adapters.torch_distributed.harness import Ranks

LIMIT_S = 20.0
"""A killed process is noticed at once, so much sooner than the time limit of 30 s of the group."""


class Layer(nn.Linear):
    """A stage; the one of the lost rank ends its process in the middle of a step."""

    def __init__(self, is_lost: bool) -> None:
        super().__init__(6, 6)
        self.calls, self.is_lost = 0, is_lost

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.is_lost and self.calls == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tanh(super().forward(x))


def train(on: Ranks, lost: int, group: Any, copies: Any = None) -> None:
    """Train until the stage of a rank is lost; the error names that rank."""
    number, size = dist.get_rank(group), dist.get_world_size(group)
    layer = Layer(on.rank == lost)
    stage = PipelineStage(layer, number, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    stop = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < stop:
            given = [torch.ones(8, 6)] if number == 0 else []
            schedule.step(*given, **({"target": torch.zeros(8, 6)} if number == size - 1 else {}))
            for parameter in layer.parameters():
                if copies is not None:
                    dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=copies)
    except RingcommError as problem:
        assert isinstance(problem, PeerLostError), problem
        assert problem.rank == lost and f"rank {lost} " in str(problem), str(problem)
        return
    raise AssertionError("no error came")


def in_rows(on: Ranks, lost: int) -> None:
    """Two pipelines side by side: some ranks share no group with the lost one but the default group."""
    mesh = init_device_mesh("cpu", (2, on.size // 2), mesh_dim_names=("copies", "stages"))
    train(on, lost, mesh.get_group("stages"), mesh.get_group("copies"))


def check_the_first_stage_is_lost(on: Ranks) -> None:
    """Its process serves the rendezvous, over which failures are reported."""
    train(on, 0, on.ring)


def check_a_stage_of_one_of_two_pipelines_is_lost(on: Ranks) -> None:
    """That of a rank that serves the rendezvous of its pipeline's group."""
    in_rows(on, 2)


def check_a_stage_that_serves_no_rendezvous_is_lost(on: Ranks) -> None:
    in_rows(on, 3)
