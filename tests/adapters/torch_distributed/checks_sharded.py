"""FSDP2 (``fully_shard``) and distributed checkpoints: the same numbers as one process."""

from __future__ import annotations

import tempfile
from typing import Any, Dict, List, Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.adapters.torch_distributed.harness import Ranks

SHARES = 12
"""Rows of a batch: 2, 3 and 4 ranks get equal shares."""


class Feed(nn.Module):
    """A layer whose parameters have 13, 7 and 1 rows, which no number of ranks divides evenly."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 13, bias=bias), nn.Linear(13, 7)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


def build() -> nn.Sequential:
    torch.manual_seed(21)
    return nn.Sequential(Feed(), Feed(bias=False), Feed()).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(SHARES, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    model = build()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def share(on: Ranks, step: int) -> torch.Tensor:
    return batch(step).chunk(on.size)[on.rank]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def train(model: nn.Module, optimizer: Any, batches: Sequence[torch.Tensor]) -> None:
    for inputs in batches:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def alone(steps: int) -> nn.Sequential:
    """The model after training in one process."""
    model = build()
    train(model, adam(model), [batch(step) for step in range(steps)])
    return model


def same(found: nn.Module, wanted: nn.Module, off: float = 1e-10) -> None:
    for (name, mine), (_, other) in zip(found.named_parameters(), wanted.named_parameters()):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        assert torch.allclose(whole.to(other.dtype), other, rtol=off, atol=off), (name, whole, other)


def grids(on: Ranks) -> List[DeviceMesh]:
    """A line of all ranks; two copies, each of which is sharded; and copies that are not sharded."""
    shapes = [(on.size,), (on.size, 1)] + ([(2, on.size // 2)] if on.size % 2 == 0 else [])
    names = ("copies", "shards")
    return [init_device_mesh("cpu", item, mesh_dim_names=names[-len(item):]) for item in shapes]  # fmt: skip


def check_fully_sharded_training(on: Ranks) -> None:
    """Also with parameters that are divided by columns, and with shards that are kept on the CPU."""

    def columns(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.ndim > 1 and parameter.shape[1] % on.size == 0 else 0)

    wanted, meshes = alone(4), grids(on)
    cases = [(mesh, {"reshard_after_forward": bool(place)}) for place, mesh in enumerate(meshes)]
    cases.append((meshes[0], {"shard_placement_fn": columns}))
    cases.append((meshes[0], {"offload_policy": CPUOffloadPolicy(pin_memory=False)}))
    for mesh, options in cases:
        model = sharded(mesh, **options)
        train(model, adam(model), [share(on, step) for step in range(4)])
        same(model, wanted)


def check_two_levels(on: Ranks) -> None:
    """Another backend within each of two hosts, ringcomm between them; Gloo is in the place of NCCL."""
    if on.size % 2:
        return
    hosts = torch.arange(on.size).view(2, -1)
    within = [dist.new_group(ranks, backend="gloo") for ranks in hosts.tolist()]
    between = [dist.new_group(ranks, backend="ringcomm") for ranks in hosts.T.tolist()]
    host, place = divmod(on.rank, on.size // 2)
    groups, names = [between[place], within[host]], ("hosts", "local")
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=hosts, mesh_dim_names=names)
    assert [dist.get_backend(mesh.get_group(name)) for name in names] == ["ringcomm", "gloo"]
    model = sharded(mesh)
    train(model, adam(model), [share(on, step) for step in range(3)])
    same(model, alone(3))


def folder_of_all(on: Ranks) -> str:
    folder: List[Any] = [tempfile.mkdtemp() if on.rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    return str(folder[0])


def check_a_checkpoint_of_another_number_of_ranks(on: Ranks) -> None:
    """Written by all ranks, read by fewer, whose training goes on as if nothing had happened."""
    folder, wanted = folder_of_all(on), alone(4)
    mesh = grids(on)[-1]
    model = sharded(mesh)
    optimizer = adam(model)
    train(model, optimizer, [share(on, step) for step in range(2)])
    parts, states = get_state_dict(model, optimizer)
    checkpoint.save({"model": parts, "optimizer": states, "step": 2}, checkpoint_id=folder)
    few = on.size - 1
    group = dist.new_group(list(range(few)))
    if on.rank < few:
        _continue(on, folder, DeviceMesh.from_group(group, "cpu"), wanted)
    on.together("loaded")
    laid_out = distribute_tensor(torch.zeros(13, 7, dtype=torch.float64), grids(on)[0], [Shard(1)])
    only = {"model": {"0.up.weight": laid_out}}  # one tensor of the checkpoint, and divided otherwise
    checkpoint.load(only, checkpoint_id=folder)
    whole = model.get_parameter("0.up.weight").full_tensor()
    assert torch.equal(laid_out.full_tensor(), whole)


def _continue(on: Ranks, folder: str, mesh: DeviceMesh, wanted: nn.Module) -> None:
    model = sharded(mesh)
    optimizer = adam(model)
    parts, states = get_state_dict(model, optimizer)
    state: Dict[str, Any] = {"model": parts, "optimizer": states, "step": 0}
    checkpoint.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    assert state["step"] == 2
    set_state_dict(model, optimizer, model_state_dict=parts, optim_state_dict=states)
    train(model, optimizer, [batch(step).chunk(mesh.size())[on.rank] for step in range(2, 4)])
    same(model, wanted)
