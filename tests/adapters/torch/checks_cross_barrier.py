"""What every rank checks about updates that overlap the next forward pass: the results stay the same."""

from __future__ import annotations

import copy
from typing import Any, List

import torch
from torch import nn

import ringcomm.torch as hvd
from tests.adapters.torch.harness import same_everywhere, with_errors

WIDTH = 32


class Attending(nn.Module):
    """Modules in modules; the attention's last layer is not called; one matrix is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.last.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.first(inputs)
        found = self.norm(found + self.attention(found, found, found)[0])
        result: torch.Tensor = self.again(torch.tanh(self.last(found)))
        return result


def train(overlap: bool, kind: str, compression: Any, steps: int = 5) -> Any:
    torch.manual_seed(5)
    model = Attending()
    own: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    if kind == "adam":
        first, rest = {"params": model.first.parameters(), "lr": 0.01}, list(model.parameters())[4:]
        own = torch.optim.AdamW([first, {"params": rest}], lr=0.003)
    optimizer = hvd.DistributedOptimizer(own, model.named_parameters(), compression=compression)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    barrier = hvd.CrossBarrier(model, optimizer) if overlap else None
    losses: List[float] = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        inputs = torch.randn(4, 6, WIDTH, generator=generator)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if barrier is not None and hvd.size() > 1:
            assert barrier.pending
        losses.append(float(loss.detach()))
    state = copy.deepcopy(model.state_dict())  # makes the last updates
    if barrier is not None:
        assert not barrier.pending
        barrier.close()
    return losses, state, optimizer, model


def check_the_same_weights_as_without() -> None:
    for kind, compression in (("sgd", "none"), ("adam", "int8"), ("sgd", hvd.PowerSGD(2)), ("adam", "bf16")):
        losses, plain, _, _ = train(False, kind, compression)
        others, overlapped, _, _ = train(True, kind, compression)
        assert losses == others, (kind, compression)
        for name, tensor in plain.items():
            assert torch.equal(tensor, overlapped[name]), (kind, compression, name)
            same_everywhere(tensor)


def check_a_closed_one_leaves_the_optimizer_as_it_was() -> None:
    _, _, optimizer, model = train(True, "sgd", "none", 2)
    before = model.last.weight.detach().clone()
    model(torch.ones(1, 2, WIDTH)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.last.weight)


def check_clipping_and_states_wait_for_the_updates() -> None:
    _, _, optimizer, model = train(False, "sgd", "none", 1)
    barrier = hvd.CrossBarrier(model, optimizer)
    for act in (optimizer.state_dict, model.state_dict, barrier.finish):
        optimizer.zero_grad()
        model(torch.ones(1, 2, WIDTH)).sum().backward()
        optimizer.step()
        act()
        assert not barrier.pending
        same_everywhere(model.last.weight.detach())
    optimizer.zero_grad()
    model(torch.ones(1, 2, WIDTH)).sum().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert not barrier.pending
    barrier.close()


def check_what_it_refuses() -> None:
    weight = nn.Parameter(torch.ones(8))
    model = nn.Module()
    model.weight = weight
    plain = torch.optim.SGD([weight], 0.1)
    with_errors(ValueError, lambda: hvd.CrossBarrier(model, plain), "DistributedOptimizer")
    lbfgs = hvd.DistributedOptimizer(torch.optim.LBFGS([weight]))
    with_errors(ValueError, lambda: hvd.CrossBarrier(model, lbfgs), "LBFGS")
    if hvd.size() == 1:
        return
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), model.named_parameters())
    barrier = hvd.CrossBarrier(model, optimizer)
    (weight * 2.0).sum().backward()  # outside of every module
    optimizer.step()
    loss = (weight * 2.0).sum()
    with_errors(ValueError, loss.backward, "weight was used in a forward pass before its update")
    barrier.close()
    hvd.barrier()
