"""What every rank checks about updates that overlap the next forward pass: the results stay the same."""

from __future__ import annotations

import copy
import random
from typing import Any, Dict, List

import torch
from torch import nn

import ringcomm.torch as hvd
from tests.adapters.torch.harness import same_everywhere
from tests.support.errors import raises

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


class Branching(nn.Module):
    """A branch is used in every other step only; a scale has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor, step: int) -> torch.Tensor:
        found = torch.tanh(self.first(inputs))
        if step % 2 or step == 0:
            found = found + self.branch(found)
        result: torch.Tensor = self.last(found) * self.scale
        return result


OPTIMIZERS: Dict[str, Dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": torch.tensor(0.01), "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "foreach": True},
    "NAdam": {"lr": 0.01, "weight_decay": 0.1},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "Adagrad": {"lr": 0.05},
    "Adadelta": {"lr": 0.5, "maximize": True},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.01, "t0": 2.0},
    "Rprop": {"lr": 0.01},
    "Adafactor": {"lr": 0.05},
}


def program(overlap: bool, kind: str, seed: int) -> Any:
    """A training loop of which the seed chooses schedule, hooks, added parameters and resets of gradients."""
    pick = random.Random(seed)
    zero = pick.choice(["none", "zeros", "model", "zeros"])
    where = pick.choice(["before", "after", "between"])
    schedule, hooks, adds = pick.choice(["", "step", "cosine"]), pick.random() < 0.3, pick.random() < 0.3
    torch.manual_seed(seed)
    model, extra = Branching(), nn.Linear(2, 2)
    make = getattr(torch.optim, kind, None)
    if make is None:  # an older PyTorch
        return None
    own = make(model.parameters(), **copy.deepcopy(OPTIMIZERS[kind]))
    names = [*model.named_parameters(), *((f"extra.{name}", item) for name, item in extra.named_parameters())]
    optimizer = hvd.DistributedOptimizer(own, names)
    barrier = hvd.CrossBarrier(nn.ModuleList([model, extra]), optimizer) if overlap else None
    seen: List[Any] = []
    if hooks:
        optimizer.register_step_pre_hook(lambda *_: seen.append(float(model.last.bias.grad.sum())))
        optimizer.register_step_post_hook(lambda *_: seen.append(float(model.scale.detach())))
    schedules = {
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
    }
    scheduler = schedules[schedule]() if schedule else None

    def reset(now: str) -> None:
        if now == where:
            model.zero_grad() if zero == "model" else optimizer.zero_grad(set_to_none=zero == "none")

    for step in range(6):
        reset("before")
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        outputs = model(torch.randn(4, 6, generator=generator), step)
        if adds and step == 3:
            optimizer.add_param_group({"params": extra.parameters(), "lr": 0.03})
        if adds and step > 3:
            outputs = extra(outputs)
        reset("between")
        loss = outputs.square().mean()
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
        if scheduler is not None:
            scheduler.step()
        reset("after")
    state = copy.deepcopy(model.state_dict())
    if barrier is not None:
        barrier.close()
    return seen, state, (zero, where, schedule, hooks, adds)


def check_programs_give_the_same_bits_as_without() -> None:
    for seed in range(3):
        for place, kind in enumerate(OPTIMIZERS):
            given, plain = [program(overlap, kind, 100 * seed + place) for overlap in (True, False)]
            if plain is None:
                continue
            assert given[0] == plain[0], (kind, plain[2])
            for name, tensor in plain[1].items():
                assert torch.equal(tensor, given[1][name]), (kind, plain[2], name)
                same_everywhere(tensor)


class Counting(torch.optim.SGD):
    """It counts its steps in an option of its groups, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def check_what_cannot_be_the_same_is_refused() -> None:
    if hvd.size() == 1:
        return
    for kind, text in ((Counting, "its step() changes options"), (torch.optim.SGD, "were changed in place")):
        model = nn.Linear(3, 3)
        optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), model.named_parameters())
        barrier = hvd.CrossBarrier(model, optimizer)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        if kind is torch.optim.SGD:
            model.zero_grad(set_to_none=False)
        raises(ValueError, barrier.finish, text)
        barrier.close()


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
    raises(ValueError, lambda: hvd.CrossBarrier(model, plain), "DistributedOptimizer")
    lbfgs = hvd.DistributedOptimizer(torch.optim.LBFGS([weight]))
    raises(ValueError, lambda: hvd.CrossBarrier(model, lbfgs), "LBFGS")
    if hvd.size() == 1:
        return
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), model.named_parameters())
    barrier = hvd.CrossBarrier(model, optimizer)
    (weight * 2.0).sum().backward()  # outside of every module
    optimizer.step()
    loss = (weight * 2.0).sum()
    raises(ValueError, loss.backward, "weight was used in a forward pass before its update")
    barrier.close()
    hvd.barrier()
