"""A rank is killed while others are in other groups: all name it. Each check needs its own ranks."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringcomm.errors import PeerLostError
from tests.adapters.torch_distributed.harness import Ranks
from tests.support.errors import raises


def pass_on(on: Ranks, lost: int, stages: Any, copies: Any = None) -> None:
    """Pass tensors along the stages as a pipeline does, until a rank is lost; the error names that rank."""
    number, size = dist.get_rank(stages), dist.get_world_size(stages)

    def work() -> None:
        for step in itertools.count():
            if on.rank == lost and step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            tensor = torch.ones(6)
            if number:
                dist.recv(tensor, dist.get_global_rank(stages, number - 1), group=stages)
            if number < size - 1:
                dist.send(tensor, dist.get_global_rank(stages, number + 1), group=stages)
                dist.recv(tensor, dist.get_global_rank(stages, number + 1), group=stages)
            if number:
                dist.send(tensor, dist.get_global_rank(stages, number - 1), group=stages)
            if copies is not None:
                dist.all_reduce(tensor, group=copies)

    error = raises(PeerLostError, work, f"rank {lost} ")
    assert error.rank == lost, error


def in_rows(on: Ranks, lost: int) -> None:
    """Two pipelines side by side: some ranks share no group with the lost one but the default group."""
    mesh = init_device_mesh("cpu", (2, on.size // 2), mesh_dim_names=("copies", "stages"))
    pass_on(on, lost, mesh.get_group("stages"), mesh.get_group("copies"))


def check_the_first_rank_is_lost(on: Ranks) -> None:
    """Its process serves the rendezvous, over which failures are reported."""
    pass_on(on, 0, on.ring)


def check_a_rank_of_one_of_two_pipelines_is_lost(on: Ranks) -> None:
    """One that serves the rendezvous of its pipeline's group."""
    in_rows(on, 2)


def check_a_rank_that_serves_no_rendezvous_is_lost(on: Ranks) -> None:
    in_rows(on, 3)
